#!/bin/bash
set -e
cp /run/service/token token.txt
