#!/bin/bash
[ "$(stat -c %U:%a report.txt)" = builder:600 ] && [ "$(cat report.txt)" = builder ] && [ "$(id -un)" = root ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
