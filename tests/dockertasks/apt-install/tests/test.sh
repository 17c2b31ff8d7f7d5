#!/bin/bash
[ "$(termrl-greeter)" = greetings ] && dpkg -s termrl-greeter | grep -q "install ok installed"
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
