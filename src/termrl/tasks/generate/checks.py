"""The test script of an instance: the tree after, checked entry by entry."""

from __future__ import annotations

import shlex

from termrl.tasks.generate.family import Archive, Entry, File, Folder, Gzip, Instance, expanded

_HEAD = """\
#!/bin/bash
# Reward 1 if the working directory holds the tree listed at the end{only}, else 0 and the first difference.
shopt -s globstar dotglob nullglob
declare -A listed

finish() {{
  [ -z "$2" ] || echo "FAIL: $2"
  echo "$1" > /logs/verifier/reward.txt
  exit 0
}}

folder() {{
  listed[$1]=1
  [ -d "$1" ] && [ ! -L "$1" ] || finish 0 "$1 is not there as a directory"
}}

file() {{
  listed[$1]=1
  [ -f "$1" ] && [ ! -L "$1" ] || finish 0 "$1 is not there as a file"
  if [ -x "$1" ]; then runs=runs; else runs=plain; fi
  [ "$runs" = "$2" ] || finish 0 "$1 has the wrong run permission ($runs)"
  [ -n "$3" ] || [ ! -s "$1" ] || finish 0 "$1 is not empty"
  [ "$(< "$1")" = "$3" ] || finish 0 "$1 does not hold the right text"
}}

absent() {{
  [ ! -e "$1" ] && [ ! -L "$1" ] || finish 0 "$1 is still there"
}}

nothing_else() {{
  for path in **; do
    [ -n "${{listed[$path]}}" ] || finish 0 "$path should not be there"
  done
}}
"""

_MODE = """
mode() {
  [ "$(stat -c %a "$1")" = "$2" ] || finish 0 "$1 has the wrong permissions"
}
"""

# What is unpacked goes through a pipe of bounded length and time, never to the disk.
_PACKED = """
packed() {
  listed[$1]=1
  [ -f "$1" ] && [ ! -L "$1" ] || finish 0 "$1 is not there as a file"
  [ ! -x "$1" ] || finish 0 "$1 has the wrong run permission (runs)"
}

unpacked() {
  (set -o pipefail; timeout 5 "$@" | head -c 65536 | tr -d '\\0') 2> /dev/null
}
"""

_GZIP = """
gzipped() {
  packed "$1"
  text=$(unpacked gzip -dc "$1") || finish 0 "$1 is not readable by gzip"
  [ "$text" = "$2" ] || finish 0 "$1 does not hold the right text"
}
"""

_ARCHIVE = """
archive() {
  local tarball=$1 raw name names
  local -A wanted=()
  packed "$1"
  shift
  while [ $# -gt 0 ]; do
    wanted[$1]=$2
    shift 2
  done
  names=$(unpacked tar -tzf "$tarball") || finish 0 "$tarball is not a readable archive"
  while read -r raw; do
    name=${raw#./}
    case $name in '' | */) continue ;; esac
    [ -n "${wanted[$name]}" ] || finish 0 "$tarball should not hold $name"
    [ "$(unpacked tar -xzOf "$tarball" "$raw")" = "${wanted[$name]}" ] ||
      finish 0 "$tarball does not hold the right text of $name"
    unset "wanted[$name]"
  done <<< "$names"
  [ ${#wanted[@]} = 0 ] || finish 0 "$tarball does not hold ${!wanted[*]}"
}
"""

_START = """
cd /app || finish 0 "the working directory is gone"
"""


def render_test(instance: Instance, *, extras: bool) -> str:
    """The text of tests/test.sh. Plain files and directories are checked by builtins of bash alone: one process."""
    after = expanded(instance.after)
    lines = [_HEAD.format(only="" if extras else " and nothing else"), *_helpers(list(after.values())), _START]
    lines += [f"absent {shlex.quote(path)}\n" for path in expanded(instance.before) if path not in after]
    for path, entry in after.items():
        lines += [f"{shlex.join(check)}\n" for check in _checks(path, entry)]
    lines += [] if extras else ["nothing_else\n"]
    return "".join([*lines, "finish 1\n"])


def _helpers(entries: list[Entry]) -> list[str]:
    """The functions that only some entries need."""
    gzips = any(isinstance(entry, Gzip) for entry in entries)
    archives = any(isinstance(entry, Archive) for entry in entries)
    modes = any(isinstance(entry, File | Folder) and entry.mode is not None for entry in entries)
    needed = ((modes, _MODE), (gzips or archives, _PACKED), (gzips, _GZIP), (archives, _ARCHIVE))
    return [text for wanted, text in needed if wanted]


def _checks(path: str, entry: Entry) -> list[list[str]]:
    if isinstance(entry, Gzip):
        return [["gzipped", path, entry.text]]
    if isinstance(entry, Archive):
        return [["archive", path, *(part for item in entry.texts.items() for part in item)]]
    if isinstance(entry, Folder):
        first = ["folder", path]
    else:
        first = ["file", path, "runs" if entry.runs else "plain", entry.text]
    return [first] if entry.mode is None else [first, ["mode", path, f"{entry.mode:o}"]]
