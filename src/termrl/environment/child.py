"""`termrl serve` as a child of this process: on loopback, on a free port, gone when this process is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from termrl.errors import EnvironmentLostError

_LISTENING = re.compile(rb"^termrl serve: listening on (https?://\S+)\s*$", re.MULTILINE)
_SETTINGS = ("TERMRL_", "TB2_", "MAX_CONCURRENT_ENVS")
_OTHERS = ("TERMRL_STATE_DIR", "TERMRL_CACHE")
_LOOK_S = 0.05
_CLOSE_S = 30.0
_TAIL = 2000


class ServerProcess:
    """One ``termrl serve`` that ends with its parent, also when that is killed. Use as an async context manager.

    Args:
        settings: TOML file with its settings; address and port are not taken from it.
        log: where all that it says goes; appended to.
        start_s: seconds until it must accept connections.
    """

    def __init__(self, settings: Path, *, log: Path, start_s: float = 60.0) -> None:
        self._command = [
            *(sys.executable, "-m", "termrl", "serve", "-c", str(settings)),
            *("--host", "127.0.0.1", "--port", "0", "--stop-with-parent"),
        ]
        self._log = log
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0  # of what the process that runs now says, in the log

    @property
    def pid(self) -> int | None:
        """The process, once started."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def ending(self) -> str:
        """How it ended and where its log is, for an error message; empty while it runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the environment server {how}; its log: {self._log}"

    def spawn(self) -> None:
        """Start it (again, after it ended) without waiting for anything."""
        with self._log.open("ab") as log:
            self._begin = log.tell()
            # a session of its own: Ctrl-C in the terminal is the parent's to handle, who still needs its environments
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environ(),
            )

    async def listening(self) -> str:
        """Its URL, once it accepts connections.

        Raises:
            EnvironmentLostError: it ended or did not accept in time; with the end of its log.
        """
        begin = self._begin
        try:
            async with asyncio.timeout(self._start_s):
                while True:
                    ended = not self.running
                    url = _LISTENING.search(self._written(begin))
                    if url is not None:
                        return url[1].decode()
                    if ended:
                        raise EnvironmentLostError(f"{self.ending}\n{self._tail(begin)}")
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            await self.stop()
            raise EnvironmentLostError(
                f"the environment server did not accept connections in {self._start_s:g} s\n{self._tail(begin)}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Let it close its sessions and end; killed when that takes too long. Idempotent."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            await asyncio.to_thread(process.wait, _CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(self.stop())

    def _written(self, begin: int) -> bytes:
        with self._log.open("rb") as log:
            log.seek(begin)
            return log.read()

    def _tail(self, begin: int) -> str:
        return self._written(begin).decode("utf-8", "replace")[-_TAIL:].strip()


def _environ() -> dict[str, str]:
    """The child's variables: none that would be a setting over its file, and this very package to import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS) or name in _OTHERS}
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}
