"""Why a run ended before its time, in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from termrl.errors import TermrlError


class Stoppable(Protocol):
    """What has an end; ``stopped`` says why it came early, and goes into the run's summary."""

    stopped: str | None


@contextmanager
def told_why(run: Stoppable) -> Iterator[None]:
    """Around the work of ``run``: an error that ends it is told there, and goes on."""
    try:
        yield
    except asyncio.CancelledError:
        run.stopped = "interrupted"
        raise
    except TermrlError as error:
        run.stopped = error.message
        raise
    except Exception as error:
        run.stopped = f"{type(error).__name__}: {error}"
        raise
