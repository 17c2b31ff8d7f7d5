#!/bin/bash
set -e
awk '{ s += $1 } END { print s }' numbers.txt > sum.txt 2>/dev/null || python3 -c 'print(sum(map(int, open("numbers.txt"))))' > sum.txt
