#!/bin/bash
[ "$(cat limit.txt)" = 268435456 ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
