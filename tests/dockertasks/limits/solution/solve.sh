#!/bin/bash
set -e
cat /sys/fs/cgroup/memory.max 2>/dev/null > limit.txt || cat /sys/fs/cgroup/memory/memory.limit_in_bytes > limit.txt
