#!/bin/bash
set -e
cd site
nohup python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &
for _ in $(seq 50); do curl -s -o /dev/null http://127.0.0.1:8000/ && break; sleep 0.1; done
