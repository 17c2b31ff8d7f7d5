"""``termrl serve`` as a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "src"
_READY = "termrl serve: listening on "


@contextlib.contextmanager
def served(*arguments: str | Path) -> Iterator[str]:
    """Serve until the block ends; gives the URL. The server is told to end in order, and must."""
    command = [sys.executable, "-m", "termrl", "serve", *map(str, arguments), "--port", "0", "--stop-with-parent"]
    environ = {**os.environ, "PYTHONPATH": str(_SOURCE)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith(_READY), f"the server said {line!r}"
            yield line.removeprefix(_READY).strip()
        finally:
            process.stdin.close()
            try:
                code = process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert code == 0
