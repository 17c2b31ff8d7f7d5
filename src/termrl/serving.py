"""Running an ASGI app in this event loop on a socket of ours; the process's signals stay with their owner."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to ``host`` (a name or an address) and ``port`` (0: a free one), not yet listening.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, host: str) -> str:
    """``http://host:port`` of a bound socket."""
    address = f"[{host}]" if listener.family == socket.AF_INET6 else host
    return f"http://{address}:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def running(app: Any, listener: socket.socket, **options: Any) -> AsyncIterator[None]:
    """Serve ``app`` on ``listener``, and close both on leaving; ``options`` are those of :class:`uvicorn.Config`.

    Raises:
        OSError: it did not start.
    """
    runner = _Runner(uvicorn.Config(app, log_config=None, access_log=False, backlog=4096, **options))
    task = asyncio.create_task(runner.serve(sockets=[listener]))
    try:
        while not runner.started:
            if task.done():
                await task
                raise OSError("the server did not start")
            await asyncio.sleep(0.005)
        yield
    finally:
        runner.should_exit = True
        await task


class _Runner(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
