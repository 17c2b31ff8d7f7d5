"""What a task family is: a name, a level and a builder of instances, each a tree before and a tree after."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class File:
    """A text file. ``text`` has no trailing newline: one is written, and the test accepts it with or without.

    ``mode`` are exact permission bits; where it is ``None`` the test only asks whether the file can be run.
    """

    text: str = ""
    runs: bool = False
    mode: int | None = None


@dataclass(frozen=True)
class Folder:
    """A directory. Those that hold something need no entry of their own, unless the test asks for a ``mode``."""

    mode: int | None = None


@dataclass(frozen=True)
class Gzip:
    """A text file compressed with gzip, judged by what it decompresses to. Not empty."""

    text: str


@dataclass(frozen=True)
class Archive:
    """A ``.tar.gz`` of text files (path → text, none empty), judged by the names and texts in it."""

    texts: Mapping[str, str]


Entry = File | Folder | Gzip | Archive
Tree = Mapping[str, Entry]


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

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a drawn order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]


@dataclass(frozen=True)
class Family:
    """A kind of task.

    Attributes:
        name: as it stands in reports and ids.
        level: 1 near the reach of a 135M model; 2 longer commands; 3 repairs, several files, permissions.
        build: makes one instance.
        look_first: the solution needs the output of its first command.
        extras: the test tolerates entries that nobody asked for.
    """

    name: str
    level: int
    build: Callable[[Draw], Instance]
    look_first: bool = False
    extras: bool = False


def bystander(draw: Draw) -> dict[str, Entry]:
    """A file that has nothing to do with the task and must stay as it is."""
    name, text = draw.words(2)
    return {f"{name}.txt": File(text)}


def lines_of(draw: Draw, count: int) -> str:
    """``count`` words, one a line."""
    return "\n".join(draw.words(count))


def without(tree: Tree, *gone: str) -> Tree:
    """The tree less some of its paths."""
    return {path: entry for path, entry in tree.items() if path not in gone}


def expanded(tree: Tree) -> dict[str, Entry]:
    """The tree with an entry for every parent folder, sorted by path."""
    full: dict[str, Entry] = dict(tree)
    for path in tree:
        for parent in PurePosixPath(path).parents:
            if str(parent) != ".":
                full.setdefault(str(parent), Folder())
    return dict(sorted(full.items()))
