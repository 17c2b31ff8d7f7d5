#!/bin/bash
set -e
pwd > where.txt
