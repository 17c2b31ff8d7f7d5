#!/bin/bash
[ -n "$EXPECTED" ] && [ "$(cat words.txt)" = "$EXPECTED" ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
