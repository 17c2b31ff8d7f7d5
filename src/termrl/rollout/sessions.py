"""Policy sessions on a session server in this process, talked to over loopback HTTP like any other endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from termrl.agent.policy import ChatPolicy
from termrl.capture.chat import SamplingDefaults
from termrl.capture.server import SessionServer
from termrl.errors import TermrlError
from termrl.rollout.scheduler import PolicySession

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class ServerSessions:
    """Opens a session per episode on ``server``; ``client`` carries the calls of all of them."""

    def __init__(self, server: SessionServer, client: AsyncOpenAI, *, stop_at_fence: bool) -> None:
        self._server = server
        self._client = client
        self._stop_at_fence = stop_at_fence

    @asynccontextmanager
    async def open(self, order: int, *, temperature: float | None) -> AsyncIterator[PolicySession]:
        """A policy with its own token record, deleted on every path. Without a temperature it is 1."""
        sampling = SamplingDefaults(stop_at_fence=self._stop_at_fence)
        if temperature is not None:
            sampling = sampling.model_copy(update={"temperature": temperature})
        session_id = self._server.create_session(order=order, sampling=sampling)
        policy = ChatPolicy(
            self._client,
            model=self._server.upstream.model_name,
            temperature=temperature,
            base_url=f"{self._server.url}/sessions/{session_id}/v1",
        )
        try:
            yield PolicySession(
                policy,
                segments=lambda: self._server.segments(session_id),
                counters=lambda: asdict(self._server.counters(session_id)),
            )
        finally:
            with contextlib.suppress(TermrlError):  # gone already when the server is shutting down
                self._server.delete_session(session_id)

    async def settle(self) -> None:
        """Return when the engine has released every deleted session, so that its weights can be renewed."""
        await asyncio.sleep(0)  # deleted sessions hand their release to the engine in the loop's next round
        await self._server.upstream.release("")
