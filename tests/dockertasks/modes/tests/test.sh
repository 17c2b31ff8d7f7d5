#!/bin/bash
[ "$(stat -c %a job.sh secret.txt | tr "\n" " ")" = "755 600 " ] && [ "$(./job.sh)" = done ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
