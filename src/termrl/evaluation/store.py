"""The folder of an evaluation, which it alone writes to.

::

    config.given.toml, config.toml, versions.json, inputs.json   as of a training run
    tasks/            the bundled suite's tasks, where those are attempted
    results.jsonl     one line for each attempt, on disk as soon as it has ended
    lost.jsonl        lines without a verdict that were in results.jsonl before a resume made the attempts again
    summary.json      the figures, written last
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import orjson

from termrl.errors import RunError
from termrl.evaluation.results import Key, Result, read_result
from termrl.runs.files import append_jsonl, read_jsonl, sync_folder, write_atomically
from termrl.runs.store import RunStore

RESULTS, LOST = "results.jsonl", "lost.jsonl"


class EvalStore(RunStore):
    """An evaluation's folder. Use as a context manager."""

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__(path, lock)
        self.results: dict[Key, Result] = {}

    @classmethod
    def begin(cls, path: Path, *, given: str, resolved: str) -> Self:
        """Start a new folder.

        Raises:
            RunError: the folder holds something already, or cannot be made.
        """
        return cls.create(path, given=given, resolved=resolved, folders=())

    @classmethod
    def go_on(cls, path: Path) -> Self:
        """Open the folder of an evaluation that stopped; nothing in it is changed before :meth:`drop_lost`.

        Raises:
            RunError: there is none, a process still writes to it, or its results cannot be read.
        """
        store = cls.resume(path)
        try:
            store.results = store._read()[0]
        except BaseException:
            store.close()
            raise
        return store

    def add(self, line: dict[str, Any]) -> None:
        """Write one attempt, on disk when this returns."""
        append_jsonl(self.path / RESULTS, [line])
        result = read_result(line)
        self.results[result.key] = result

    def drop_lost(self) -> None:
        """Make the folder ready to go on: attempts without a verdict, and what a kill tore, leave the results."""
        path = self.path / RESULTS
        self.results, kept, lost = self._read()
        for temporary in self.path.glob(".*.*"):
            temporary.unlink(missing_ok=True)
        (self.path / "summary.json").unlink(missing_ok=True)
        if path.exists() and path.stat().st_size != sum(map(len, kept)):
            if lost:
                append_jsonl(self.path / LOST, lost)
            write_atomically(path, b"".join(kept))
        sync_folder(self.path)

    def _read(self) -> tuple[dict[Key, Result], list[bytes], list[dict[str, Any]]]:
        """The results that count, their lines, and the lines that do not count."""
        path = self.path / RESULTS
        results: dict[Key, Result] = {}
        kept: list[bytes] = []
        lost: list[dict[str, Any]] = []
        try:
            for line in read_jsonl(path):
                result = read_result(line)
                if result.reward is None or result.key in results:
                    lost.append(line)
                else:
                    results[result.key] = result
                    kept.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}: not the results of termrl eval: {type(error).__name__}: {error}") from None
        return results, kept, lost
