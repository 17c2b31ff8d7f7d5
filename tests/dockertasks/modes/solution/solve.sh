#!/bin/bash
set -e
chmod 755 job.sh
chmod 600 secret.txt
