#!/bin/bash
set -e
cp 'Grüße an 世界.txt' 'a copy.txt'
