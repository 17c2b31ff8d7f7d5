#!/bin/bash
[ "$(cat out.txt)" = "made in another stage" ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
