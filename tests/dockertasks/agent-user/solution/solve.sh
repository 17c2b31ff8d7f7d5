#!/bin/bash
set -e
umask 077
id -un > report.txt
