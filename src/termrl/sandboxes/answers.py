"""What a resident is asked and answers when it looks at a sandbox, see ``staged.look``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from termrl.sandboxes.base import Census, ChangedFiles


def read_census(data: bytes) -> Census:
    """The answer to ``census``."""
    lines = [line.decode("utf-8", "replace") for line in data.split(b"\0")]
    names = tuple(line[2:42] for line in lines if line.startswith("p "))
    return Census(names, tuple(line[2:] for line in lines if line.startswith("l ")))


def changes_request(
    since: float, workdir: str, names: Sequence[str], folders: Sequence[str], trees: Sequence[str]
) -> list[bytes]:
    """The fields of ``changes``, its arguments those of :meth:`termrl.sandboxes.base.Sandbox.changes`."""
    lists = [b"\n".join(map(os.fsencode, each)) for each in (names, folders, trees)]
    return [str(int(since * 1e9)).encode(), os.fsencode(workdir.rstrip("/") or "/"), *lists]


def read_changes(data: bytes) -> ChangedFiles:
    """The answer to ``changes``."""
    first, *entries = data.decode("utf-8", "replace").split("\0")
    paths = tuple(entry for entry in entries if entry.startswith("/"))
    return ChangedFiles(paths, tuple(entry[1:] for entry in entries if entry.startswith(">")), first == "+")
