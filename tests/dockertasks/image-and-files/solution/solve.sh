#!/bin/bash
set -e
sort names.txt > sorted.txt
