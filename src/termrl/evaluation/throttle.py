"""How many calls an endpoint gets at once: halved when it says too many, one more after each round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_FIRST_S, _LONGEST_S = 1.0, 30.0


class Throttle:
    """Bounds the calls in flight to one endpoint, and holds all of them back while it asks to be left alone.

    Args:
        most: calls at once; where it begins, and what it grows back to.
        on_change: told the new bound when it is halved.
    """

    def __init__(self, most: int, on_change: Callable[[int], None] = lambda limit: None) -> None:
        self._most = most
        self._limit = float(most)
        self._on_change = on_change
        self._in_flight = 0
        self._halved_at = -1.0
        self._resume_at = 0.0
        self._refusals = 0
        self._changed = asyncio.Condition()

    @property
    def limit(self) -> int:
        """Calls that may be in flight now."""
        return int(self._limit)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait for a place among the calls in flight; gives the moment at which it began (``time.monotonic``)."""
        while not self._take_place():
            if (pause_s := self._resume_at - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            else:
                async with self._changed:
                    await self._changed.wait()
        try:
            yield time.monotonic()
        finally:
            self._in_flight -= 1
            await asyncio.shield(self._wake())

    def answered(self) -> None:
        """A call was answered: after as many of these as are in flight at once, there may be one more."""
        self._refusals = 0
        self._limit = min(float(self._most), self._limit + 1.0 / self._limit)

    def refused(self, began: float, *, retry_after_s: float | None, too_many: bool) -> float:
        """A call that began at ``began`` was refused; returns for how many seconds nothing is sent.

        Args:
            retry_after_s: what the endpoint asked for; ``None`` leaves it to this.
            too_many: the reason was the number of calls. Calls that were in flight together halve the bound once.
        """
        if too_many and began > self._halved_at:
            self._halved_at = time.monotonic()
            halved = max(1.0, self._limit / 2)
            if int(halved) < int(self._limit):
                self._on_change(int(halved))
            self._limit = halved
        if retry_after_s is None:
            retry_after_s = min(_LONGEST_S, _FIRST_S * 2**self._refusals)
            if time.monotonic() >= self._resume_at:
                self._refusals = min(self._refusals + 1, 10)
        self._resume_at = max(self._resume_at, time.monotonic() + retry_after_s)
        return retry_after_s

    def _take_place(self) -> bool:
        if time.monotonic() < self._resume_at or self._in_flight >= self.limit:
            return False
        self._in_flight += 1
        return True

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
