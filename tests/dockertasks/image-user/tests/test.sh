#!/bin/bash
[ "$(stat -c %U /home/worker/mine.txt)" = worker ] && [ "$(id -un)" = worker ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
