"""Ctrl-C and SIGTERM: the first ends a run in order, the second, or a long wait, at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

INTERRUPTED = 130
TERMINATED = 143
DRAIN_S = 300.0
CLOSE_S = 90.0

_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """Holds SIGINT and SIGTERM while it is entered.

    The first one cancels the task given to :meth:`attach` (or raises ``KeyboardInterrupt`` where there is none); the
    second ends the process at once, as does a first one after which it has not ended within ``drain_s`` seconds.

    Args:
        farewell: what to say then.
        state: the state folder of the sandboxes that are removed then, see
            :func:`termrl.sandboxes.host.state_folder`.
    """

    def __init__(self, farewell: str, *, state: Path | None = None, drain_s: float = DRAIN_S) -> None:
        self._farewell = farewell
        self._state = state
        self._drain_s = drain_s
        self._cancel: Callable[[], object] | None = None
        self._earlier: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self._ending = False
        self.code: int | None = None

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._earlier[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def attach(self) -> None:
        """From now on the first signal cancels the task that this is called from."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)

    def detach(self, *, failed: bool) -> None:
        """The task has ended; what still holds up the event loop's end after a while is left behind."""
        self._cancel = None
        if self._timer is None:
            self._end_in(CLOSE_S, self.code or int(failed), "what it waited for did not end")

    def end_now(self, code: int, message: str) -> NoReturn:
        """End the process without waiting for anything; what it holds of sandboxes is removed first."""
        from termrl.sandboxes.sweep import sweep

        self._ending = True
        if sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)
        print(message, file=sys.stderr, flush=True)
        try:
            sweep(self._state, own=True)
        finally:
            os._exit(code)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._ending:
            return  # each further one would begin again, one within the other, and none come to its end
        code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if self.code is not None:
            self.end_now(code, f"\nended at once; {self._farewell}")
        self.code = code
        if self._timer is not None:
            self._timer.cancel()
        self._end_in(self._drain_s, code, f"not ended in {self._drain_s:g} s, so at once")
        if self._cancel is None:
            raise KeyboardInterrupt
        self._cancel()

    def _end_in(self, seconds: float, code: int, why: str) -> None:
        self._timer = threading.Timer(seconds, self.end_now, (code, f"\n{why}; {self._farewell}"))
        self._timer.daemon = True
        self._timer.start()
