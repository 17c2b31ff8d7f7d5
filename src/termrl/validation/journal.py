"""Attempts on disk as they come, so that a study that was killed goes on where it was."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from termrl.errors import TaskError, TermrlError
from termrl.runs.files import append_jsonl, cut, read_jsonl
from termrl.tasks.task import Task
from termrl.validation.records import Attempt


class Journal:
    """The log of one study's attempts, one JSON object a line, which this process alone writes to."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Open the journal at ``path``.

        Args:
            resume: keep what it holds; otherwise it must be new.

        Raises:
            TaskError: it is there already, or is no journal.
            TermrlError: it cannot be written, or another process writes to it.
        """
        self._path = path
        self.kept: list[Attempt] = []
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | (0 if resume else os.O_EXCL), 0o644)
        except FileExistsError:
            raise TaskError(
                f"{path}: there already", hint="--resume goes on with that study; -o names another report"
            ) from None
        except OSError as error:
            raise TermrlError(f"{path}: cannot be written: {error.strerror or error}") from None
        try:
            self._take()
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TermrlError(f"{self._path}: another process writes to it") from None
        try:
            self.kept = [Attempt.model_validate(record) for record in read_jsonl(self._path)]
        except (ValueError, ValidationError) as error:
            why = str(error).splitlines()[0]
            raise TaskError(f"{self._path}: not a journal of termrl validate: {why}", hint="remove it") from None
        # a line that was torn by a kill must not run into the next one
        cut(self._path, self._path.read_bytes().rfind(b"\n") + 1)

    def usable(self, tasks: Mapping[str, Task], sandbox: str) -> list[Attempt]:
        """The attempts that need not be made again: those with a verdict, on this backend, of tasks as they are now."""
        latest = {(a.task_id, a.digest, a.sandbox, a.kind, a.round): a for a in self.kept if a.scored}
        return [
            a
            for a in latest.values()
            if a.sandbox == sandbox and a.task_id in tasks and tasks[a.task_id].digest == a.digest
        ]

    def add(self, attempt: Attempt) -> None:
        """Write one attempt, on disk when this returns."""
        append_jsonl(self._path, [attempt.model_dump(mode="json")])

    def close(self) -> None:
        """Give the journal free; an empty one is removed. Idempotent."""
        if self._lock >= 0:
            if os.fstat(self._lock).st_size == 0:
                self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
