#!/bin/bash
set -e
/opt/tool/run > out.txt
