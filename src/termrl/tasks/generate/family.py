"""What a task family is: a name, a level and a builder of instances, each a tree before and a tree after."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class File:
    """A text file. ``text`` has no trailing newline: one is written, and the test accepts it with or without."""

    text: str = ""
    runs: bool = False


@dataclass(frozen=True)
class Folder:
    """A directory. Those that hold something need no entry of their own."""


Tree = Mapping[str, File | Folder]


@dataclass(frozen=True)
class Instance:
    """One task.

    Attributes:
        instruction: one short sentence.
        before: the workdir at the start (relative path → entry; no empty folders, which archives would lose).
        after: the workdir that the test wants, and nothing else in it.
        solution: the oracle's commands, run in the workdir.
    """

    instruction: str
    before: Tree
    after: Tree
    solution: Sequence[str]


class Draw:
    """Repeatable choices for one instance, from a key alone and the same on every Python version."""

    def __init__(self, key: str, words: Sequence[str]) -> None:
        self._key = key.encode()
        self._count = 0
        self._left = list(words)

    def below(self, n: int) -> int:
        """A whole number in [0, n)."""
        self._count += 1
        value = hashlib.blake2b(self._key + self._count.to_bytes(8, "big"), digest_size=8).digest()
        return int.from_bytes(value, "big") % n

    def word(self) -> str:
        """A word that this instance does not have yet."""
        return self._left.pop(self.below(len(self._left)))

    def words(self, n: int) -> list[str]:
        """``n`` different words that this instance does not have yet."""
        return [self.word() for _ in range(n)]


@dataclass(frozen=True)
class Family:
    """A kind of task.

    Attributes:
        name: as it stands in reports and ids.
        level: 1 near the reach of a 135M model, 2 beyond it.
        build: makes one instance.
        look_first: the solution needs the output of its first command.
        extras: the test tolerates entries that nobody asked for.
    """

    name: str
    level: int
    build: Callable[[Draw], Instance]
    look_first: bool = False
    extras: bool = False


_CHECKS = """\
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

cd /app || finish 0 "the working directory is gone"
"""


def render_test(instance: Instance, *, extras: bool) -> str:
    """The text of tests/test.sh: builtins of bash only, so that it costs one process."""
    gone = [path for path in expanded(instance.before) if path not in expanded(instance.after)]
    lines = [_CHECKS.format(only="" if extras else " and nothing else")]
    lines += [f"absent {shlex.quote(path)}\n" for path in gone]
    for path, entry in expanded(instance.after).items():
        if isinstance(entry, Folder):
            lines.append(f"folder {shlex.quote(path)}\n")
        else:
            lines.append(f"file {shlex.quote(path)} {'runs' if entry.runs else 'plain'} {shlex.quote(entry.text)}\n")
    lines += [] if extras else ["nothing_else\n"]
    return "".join([*lines, "finish 1\n"])


def expanded(tree: Tree) -> dict[str, File | Folder]:
    """The tree with an entry for every parent folder, sorted by path."""
    full: dict[str, File | Folder] = dict(tree)
    for path in tree:
        for parent in PurePosixPath(path).parents:
            if str(parent) != ".":
                full.setdefault(str(parent), Folder())
    return dict(sorted(full.items()))
