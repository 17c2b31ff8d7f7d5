#!/bin/bash
[ "$(cat line.txt)" = 2500001 ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
