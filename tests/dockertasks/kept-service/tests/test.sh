#!/bin/bash
[ "$(curl -s --max-time 5 http://127.0.0.1:8000/index.html)" = served ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
