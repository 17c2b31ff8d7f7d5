"""No phase waits for ever: every call into an environment has a bound of its own, and the engine's silence is noticed.

An environment that does not answer is lost (cause ``environment_lost``) and the other episodes go on. When episodes
wait for nothing but the engine and no turn comes back, the phase is cut off: what still runs has no verdict.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from termrl.agent.types import Message, Policy, Reply
from termrl.environment.budgets import Budgets
from termrl.environment.protocol import Action, Environment, Observation, State

T = TypeVar("T")

_CLOSE_S = 60.0
_LOOK_S = 0.25

_abandoned: set[asyncio.Task[Any]] = set()


@dataclass(frozen=True)
class Bounds:
    """What a phase may wait for, in seconds.

    Attributes:
        reset_s: an environment's reset.
        grace_s: what an environment may take beyond the budget of the call itself.
        engine_s: silence of the engine while every running episode waits for it and nothing else.
        phase_s: a whole phase; ``None`` leaves it to the others.
    """

    reset_s: float = 600.0
    grace_s: float = 60.0
    engine_s: float = 900.0
    phase_s: float | None = None


class Pulse:
    """What the running episodes of one phase wait for, and when the engine last gave a sign of life."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.cut: str | None = None
        self.engine_silent = False
        self._started = self._last = time.monotonic()
        self._in_engine = 0
        self._elsewhere = 0

    async def engine(self, call: Awaitable[T]) -> T:
        """Await a turn."""
        if not self._in_engine:
            self._last = time.monotonic()
        self._in_engine += 1
        try:
            return await call
        finally:
            self._in_engine -= 1
            self._last = time.monotonic()

    async def elsewhere(self, call: Awaitable[T]) -> T:
        """Await anything that is bounded by itself."""
        self._elsewhere += 1
        try:
            return await call
        finally:
            self._elsewhere -= 1
            self._last = time.monotonic()

    async def watch(self, cut_off: Callable[[], None]) -> None:
        """Call ``cut_off`` when the phase must end; :attr:`cut` then says why."""
        while self.cut is None:
            await asyncio.sleep(_LOOK_S)
            now, bounds = time.monotonic(), self.bounds
            if self._in_engine and not self._elsewhere and now - self._last > bounds.engine_s:
                self.engine_silent = True
                self.cut = f"the engine gave no turn in {bounds.engine_s:g} s"
            elif bounds.phase_s is not None and now - self._started > bounds.phase_s:
                self.cut = f"the phase was over its {bounds.phase_s:g} s"
        cut_off()


class BoundedEnvironment(Environment):
    """An environment whose calls come back in time, whatever it does (a cancellation that it ignores, too).

    ``reset`` and ``step`` raise ``TimeoutError`` with the seconds; ``close`` gives up silently.
    """

    def __init__(self, inner: Environment, pulse: Pulse, *, command_timeout_s: float | None) -> None:
        self._inner = inner
        self._pulse = pulse
        bounds = pulse.bounds
        self.admission_s = inner.admission_s
        self._budgets = Budgets(bounds.reset_s + inner.admission_s, bounds.grace_s, command_timeout_s)

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        call = self._inner.reset(task_id, seed=seed, episode_id=episode_id)
        observation = await self._bounded("reset", call, self._budgets.reset_s)
        self._budgets = self._budgets.told(observation.info)
        return observation

    async def step(self, action: Action) -> Observation:
        return await self._bounded(action.action_type, self._inner.step(action), self._budgets.of(action))

    def state(self) -> State:
        return self._inner.state()

    async def close(self) -> None:
        try:
            await within(_CLOSE_S, self._inner.close())
        except TimeoutError:
            return

    async def _bounded(self, name: str, call: Coroutine[Any, Any, T], seconds: float) -> T:
        try:
            return await self._pulse.elsewhere(within(seconds, call))
        except TimeoutError as error:
            if str(error):
                raise
            raise TimeoutError(f"the environment did not come back from {name} in {seconds:g} s") from None


class WatchedPolicy:
    """A policy whose turns are signs of the engine's life."""

    def __init__(self, inner: Policy, pulse: Pulse) -> None:
        self._inner = inner
        self._pulse = pulse

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        """As the policy's own."""
        return await self._pulse.engine(self._inner.chat(messages, max_tokens=max_tokens, seed=seed))


@asynccontextmanager
async def closing(environment: Environment) -> AsyncIterator[Environment]:
    """Close an environment whose close is bounded, and wait for that also if this is cancelled meanwhile."""
    try:
        yield environment
    finally:
        close = asyncio.ensure_future(environment.close())
        try:
            await asyncio.shield(close)
        except asyncio.CancelledError:
            # an episode that is cancelled while it closes still holds its sandbox
            await asyncio.wait({close})
            raise


async def within(seconds: float, call: Coroutine[Any, Any, T]) -> T:
    """Await ``call`` for so long and no longer: one that ignores its cancellation is left behind.

    Raises:
        TimeoutError: without a text; ``call`` has been cancelled.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=_CLOSE_S)
        _abandon(task)
        raise
    if done:
        return task.result()
    task.cancel()
    _abandon(task)
    raise TimeoutError


def _abandon(task: asyncio.Task[Any]) -> None:
    """Keep a task that nobody awaits until it ends, and look at its outcome so that asyncio does not complain."""
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
