#!/bin/bash
[ ! -e Dockerfile ] && [ "$(cat 'a copy.txt')" = 'naïve ☃' ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
