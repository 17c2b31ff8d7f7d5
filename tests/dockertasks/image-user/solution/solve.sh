#!/bin/bash
set -e
[ "$(id -un)" = worker ]
echo mine > mine.txt
