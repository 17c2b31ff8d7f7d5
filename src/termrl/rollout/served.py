"""The embedded engine as episodes use it: behind a session server on loopback, like any other endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from termrl.rollout.bounded import within
from termrl.rollout.scheduler import Gate, PolicySessions

if TYPE_CHECKING:
    from termrl.engine.transformers import EmbeddedEngine

T = TypeVar("T")

_CLOSE_S = 15.0


@dataclass(frozen=True)
class ServedEngine:
    """What a scheduler needs of an engine. ``gate`` is ``None`` where turns are decoded as they come."""

    sessions: PolicySessions
    gate: Gate | None


@asynccontextmanager
async def serve_engine(
    engine: EmbeddedEngine, model: Path, *, schedule: Literal["lockstep", "continuous"], stop_at_fence: bool
) -> AsyncIterator[ServedEngine]:
    """Serve ``engine``, which was made from the folder ``model``, to this event loop.

    Closing is bounded: what does not end in time is left to the process's own end.
    """
    from termrl.agent.policy import chat_client
    from termrl.capture.render import renderer_for
    from termrl.capture.server import serve
    from termrl.engine.upstream import EmbeddedUpstream
    from termrl.rollout.sessions import ServerSessions

    async with AsyncExitStack() as stack:
        upstream = EmbeddedUpstream(engine, schedule=schedule)
        stack.push_async_callback(_bounded, upstream.aclose)
        server = await stack.enter_async_context(_closed_in_time(serve(upstream, renderer_for(model))))
        client = await stack.enter_async_context(chat_client(f"{server.url}/v1"))
        yield ServedEngine(
            ServerSessions(server, client, stop_at_fence=stop_at_fence), upstream if schedule == "lockstep" else None
        )


@asynccontextmanager
async def _closed_in_time(context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    value = await context.__aenter__()
    try:
        yield value
    finally:
        await _bounded(lambda: context.__aexit__(None, None, None))


async def _bounded(close: Callable[[], Coroutine[Any, Any, object]]) -> None:
    with contextlib.suppress(TimeoutError):
        await within(_CLOSE_S, close())
