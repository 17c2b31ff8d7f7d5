"""What a task folder holds, in one digest, and noticing that it changed since it was loaded."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from termrl.errors import TaskError
from termrl.tasks.folder import entries
from termrl.tasks.ignore import excluded_paths

_NOT_THE_TASK = ".git"
_NAMED = 3


def digest(folder: Path) -> str:
    """SHA-256 (hex) over names, kinds, run bits, link targets and contents of what is in a task folder.

    Times, owners, other permissions and the folder's own name do not count, so a copy or a checkout has the digest of
    its original. Neither does what never reaches a sandbox: what ``.harborignore`` leaves out, and ``.git``.
    """
    return _digest(_manifest(folder))


def tree_digest(folder: Path) -> str:
    """SHA-256 (hex) over everything in a folder, with all permission bits: what an image is made of by copying it."""
    return _digest({name: _facts(path, modes=True) for name, path in sorted(entries(folder))})


class Seal:
    """A task folder as it was when it was loaded.

    Attributes:
        digest: see :func:`digest`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stats = _stats(folder)
        self._manifest = _manifest(folder)
        self.digest = _digest(self._manifest)

    def check(self) -> None:
        """Return if the folder still holds the same.

        It costs one ``stat`` for each file as long as no file was touched; else everything is read again.

        Raises:
            TaskError: names the files that are not as they were.
        """
        try:
            now = _stats(self._folder)
            if now == self._stats:
                return
            manifest = _manifest(self._folder)
        except OSError as error:
            raise TaskError(f"{self._folder}: gone since it was loaded: {error.strerror or error}") from None
        if manifest != self._manifest:
            raise TaskError(
                f"{self._folder}: changed on disk since it was loaded: {_differences(self._manifest, manifest)}",
                hint="put back what was there, or start again with the tasks as they are now",
            )
        self._stats = now


def _stats(folder: Path) -> dict[str, tuple[int, ...]]:
    """What tells an untouched file at a glance, by path."""
    found: dict[str, tuple[int, ...]] = {}

    def visit(directory: str) -> None:
        with os.scandir(directory) as listing:
            for entry in listing:
                if entry.name == _NOT_THE_TASK:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    found[entry.path] = ()
                    visit(entry.path)
                else:
                    s = entry.stat(follow_symlinks=False)
                    # ctime cannot be set back
                    found[entry.path] = (s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)

    visit(str(folder))
    return found


def _manifest(folder: Path) -> dict[str, tuple[bytes, ...]]:
    """What stands at each path that counts, paths in order."""
    ignored = {f"{part}/{name}" for part in ("tests", "solution") for name in excluded_paths(folder / part)}
    return {
        name: _facts(path, modes=False)
        for name, path in sorted(entries(folder))
        if name not in ignored and _NOT_THE_TASK not in name.split("/")
    }


def _facts(path: Path, *, modes: bool) -> tuple[bytes, ...]:
    if path.is_symlink():
        return b"link", os.fsencode(path.readlink())
    mode = path.stat().st_mode
    all_bits = b"%o" % stat.S_IMODE(mode)
    if path.is_dir():
        return (b"folder", all_bits) if modes else (b"folder",)
    bits = all_bits if modes else b"x" if mode & 0o100 else b"-"
    return b"file", bits, hashlib.sha256(path.read_bytes()).digest()


def _digest(manifest: Mapping[str, tuple[bytes, ...]]) -> str:
    total = hashlib.sha256()
    for name, facts in manifest.items():
        for part in (facts[0], os.fsencode(name), *facts[1:]):
            total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    words = [f"{name}{' (gone)' if name not in now else ' (new)' if name not in then else ''}" for name in names]
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more
