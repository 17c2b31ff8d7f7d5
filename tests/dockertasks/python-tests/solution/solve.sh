#!/bin/bash
set -e
printf 'def area(width, height):\n    return width * height\n' > shapes.py
