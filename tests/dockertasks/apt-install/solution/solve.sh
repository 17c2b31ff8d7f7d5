#!/bin/bash
set -e
apt-get update -qq
apt-get install -y -qq termrl-greeter
