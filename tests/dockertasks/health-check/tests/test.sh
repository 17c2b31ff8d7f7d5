#!/bin/bash
[ "$(cat token.txt)" = token-4711 ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
