"""The lock of a folder of tasks: where they came from, and the digest of each, so that a change cannot go unseen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from termrl.errors import TaskError
from termrl.runs.files import write_atomically

LOCK_FILE = "termrl.lock.json"
VERSION = 1

_HINT = "termrl tasks lock DIR accepts what is there now"


@dataclass(frozen=True)
class Lock:
    """What stands in :data:`LOCK_FILE`.

    Attributes:
        tasks: digest of each task by id (see :func:`termrl.tasks.seal.digest`).
        source: where the tasks were fetched from, and ``commit``, the 40 hex digits of that version; ``None`` if the
            tasks were locked where they stood, or came from a folder without versions.
    """

    tasks: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    commit: str | None = None

    def text(self) -> str:
        """The file's content: sorted, one task a line."""
        tasks = {name: f"sha256:{digest}" for name, digest in sorted(self.tasks.items())}
        whole = {"version": VERSION, "source": self.source, "commit": self.commit, "tasks": tasks}
        return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"

    def complaints(self, found: Mapping[str, str]) -> dict[str, str]:
        """What is wrong with the tasks that were found (id → digest), by id."""
        changed = {name for name, digest in self.tasks.items() if found.get(name) != digest}
        wrong = dict.fromkeys(sorted(changed), "changed since it was locked")
        wrong |= dict.fromkeys(sorted(self.tasks.keys() - found.keys()), "is locked, but not there")
        wrong |= dict.fromkeys(sorted(found.keys() - self.tasks.keys()), "is not locked")
        return {name: f"{why} ({LOCK_FILE}; {_HINT})" for name, why in wrong.items()}


def read_lock(folder: Path) -> Lock | None:
    """The lock of a folder of tasks; ``None`` if it has none.

    Raises:
        TaskError: what stands there is no lock.
    """
    path = folder / LOCK_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read: {error}", hint=_HINT) from None
    try:
        if found["version"] != VERSION:
            raise TaskError(f"{path}: version {found['version']}: this program knows {VERSION}")
        tasks = {str(name): str(digest).removeprefix("sha256:") for name, digest in found["tasks"].items()}
        return Lock(tasks, found.get("source"), found.get("commit"))
    except (KeyError, TypeError, AttributeError):
        raise TaskError(f"{path}: not a lock of tasks", hint=_HINT) from None


def write_lock(folder: Path, lock: Lock) -> Path:
    """Write (or replace) the lock of a folder of tasks.

    Raises:
        TaskError: it cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        write_atomically(path, lock.text().encode())
    except OSError as error:
        raise TaskError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
