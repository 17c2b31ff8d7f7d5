"""What the episodes of one event loop share: the chat client, and what makes their environments.

Opened by the first episode that needs it and closed by the last one that leaves, so nothing outlives the episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from termrl.agent.policy import chat_client
from termrl.integrations.miles.settings import AgentSettings
from termrl.rollout.scheduler import EnvironmentFactory

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class Parts:
    """The shared parts of one event loop."""

    def __init__(self) -> None:
        self.users = 0
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._client: AsyncOpenAI | None = None
        self._factories: dict[str, EnvironmentFactory] = {}

    async def client(self, url: str, *, timeout_s: float) -> AsyncOpenAI:
        """The chat client; ``url`` is that of whoever asks first, others point theirs elsewhere."""
        async with self._lock:
            if self._client is None:
                opened = chat_client(url, "EMPTY", timeout_s=timeout_s)
                self._client = await self._stack.enter_async_context(opened)
            return self._client

    async def environments(self, settings: AgentSettings) -> EnvironmentFactory:
        """What makes environments as ``settings`` say.

        Raises:
            ConfigError, TaskError, SandboxStartError: they cannot be made.
        """
        key = settings.model_dump_json(
            include={"env_url", "sandbox_backend", "sandbox_settings", "tasks_dir", "environment", "images", "verify"}
            | {"message_timeout_s", "command_timeout_s"}
        )
        async with self._lock:
            if key not in self._factories:
                self._factories[key] = await self._open(settings)
            return self._factories[key]

    async def close(self) -> None:
        """Close everything."""
        await self._stack.aclose()

    async def _open(self, settings: AgentSettings) -> EnvironmentFactory:
        if settings.sandbox_backend is None or settings.tasks_dir is None:
            from termrl.environment.remote import RemoteEnvironmentFactory

            return RemoteEnvironmentFactory(settings.url, settings=settings.remote)
        from termrl.environment.terminal import COMMAND_TIMEOUT_S, LocalEnvironmentFactory
        from termrl.sandboxes import open_provider
        from termrl.tasks.taskset import TaskSet

        tasks = await asyncio.to_thread(TaskSet.load, settings.tasks_dir)
        images = {"images": settings.images} if settings.sandbox_backend == "docker" else {}
        provider = open_provider(settings.sandbox_backend, **{**images, **settings.sandbox_settings})
        return LocalEnvironmentFactory(
            tasks,
            await self._stack.enter_async_context(provider),
            command_timeout_s=settings.command_timeout_s or COMMAND_TIMEOUT_S,
            rules=settings.verify.rules(),
        )


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Parts] = WeakKeyDictionary()


@asynccontextmanager
async def shared_parts() -> AsyncIterator[Parts]:
    """The parts of the running event loop, for as long as an episode of it needs them."""
    loop = asyncio.get_running_loop()
    parts = _by_loop.get(loop)
    if parts is None:
        parts = _by_loop[loop] = Parts()
    parts.users += 1
    try:
        yield parts
    finally:
        parts.users -= 1
        if not parts.users:
            del _by_loop[loop]
            closing = asyncio.ensure_future(parts.close())
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await asyncio.wait({closing})
                raise
