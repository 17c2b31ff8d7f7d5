#!/bin/bash
[ -e sub/other.txt ] && [ "$(tr "\n" " " < sorted.txt)" = "abel mara zoe " ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
