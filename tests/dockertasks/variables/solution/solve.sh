#!/bin/bash
set -e
echo "$GREETING $IMAGE_WORD" > "$TARGET"
