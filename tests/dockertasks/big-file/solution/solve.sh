#!/bin/bash
set -e
grep -n needle /data/log.txt | cut -d: -f1 > line.txt
