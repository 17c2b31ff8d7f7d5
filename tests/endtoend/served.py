"""A real ``termrl serve`` in a process of its own, for as long as a test needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "src"
_SAYS = "termrl serve: listening on "


@dataclass(frozen=True)
class Served:
    """Where it listens, and its process."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def served(*tasks: Path, arguments: tuple[str, ...] = (), **variables: str) -> Iterator[Served]:
    """Serve folders of tasks; the server is gone after, and on the death of this process."""
    command = [sys.executable, "-m", "termrl", "serve", *map(str, tasks), "--port", "0", "--stop-with-parent"]
    process = subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": str(_SOURCE), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith(_SAYS), f"it ended: {process.wait(10)}"
        yield Served(line.removeprefix(_SAYS).strip(), process)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
