#!/bin/bash
[ "$PWD" = /srv/project/sub ] && [ "$(cat where.txt)" = /srv/project/sub ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
