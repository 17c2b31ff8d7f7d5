"""Runs episodes: each with a policy session, an environment and a place in the engine's order, all closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from termrl.agent.episode import run_episode
from termrl.agent.types import Episode, Limits, Opening, Policy
from termrl.capture.segments import Segment
from termrl.environment.protocol import Environment
from termrl.errors import ConfigError, HungError, SandboxError, TaskError, TermrlError
from termrl.rollout.bounded import BoundedEnvironment, Bounds, Pulse, WatchedPolicy, closing, within
from termrl.rollout.groups import cause_of, sampled_tokens
from termrl.verifier.causes import REPLAYED_CAUSES
from termrl.verifier.verdict import Cause, EndReason, Verdict

_SETTLE_S = 60.0


@dataclass(frozen=True)
class Attempt:
    """One episode to run. ``order`` fixes its row in lock-step batches; unique within one call of ``run``."""

    task_id: str
    family: str
    group: int
    sample: int
    seed: int
    order: int


@dataclass(frozen=True)
class PolicySession:
    """A policy with a token record of its own.

    Attributes:
        policy: what the episode talks to.
        segments: gives the tokens so far.
        counters: gives the session's fidelity figures (re-rendered turns, branches, …).
    """

    policy: Policy
    segments: Callable[[], Sequence[Segment]]
    counters: Callable[[], dict[str, int]]


class PolicySessions(Protocol):
    """Where policy sessions come from; see :mod:`termrl.rollout.sessions`."""

    def open(self, order: int, *, temperature: float | None) -> Any:
        """An async context manager that gives a :class:`PolicySession` and closes it on every path."""
        ...

    async def settle(self) -> None:
        """Return when the engine has nothing left to do for closed sessions."""
        ...


class Gate(Protocol):
    """The engine's lock-step gate: a batch starts when every episode that entered waits for a turn."""

    def enter(self, order: int) -> None:
        """An episode will ask for turns."""
        ...

    def leave(self, order: int) -> None:
        """It will ask for no more. Idempotent."""
        ...


class EnvironmentFactory(Protocol):
    """Where environments come from."""

    def create(self) -> Environment:
        """A new session, not yet reset."""
        ...


class Scheduler:
    """Runs batches of episodes on one engine and one kind of environment.

    Args:
        environments: gives each episode its environment.
        sessions: gives each episode its policy session.
        gate: the engine's lock-step gate, or ``None`` where turns are decoded as they come.
        opening: how each conversation begins.
        concurrency: episodes alive at once. In lock-step the attempts run in waves of this size, so that which
            turns share a batch does not depend on timing.
        bounds: how long anything may be waited for.
        retries: how often an episode is played again, whole, in a new policy session and with the same seed. In
            lock-step the others wait for it as they do for a slow command.
        replay: which episodes are; those that lost their environment by default. Asked after every attempt that may
            be followed by another, and after the last one.
        recover: awaited before such a retry; returns once environments can be had again, or gives up in bounded time.
    """

    def __init__(
        self,
        *,
        environments: EnvironmentFactory,
        sessions: PolicySessions,
        gate: Gate | None,
        opening: Opening,
        concurrency: int,
        bounds: Bounds | None = None,
        retries: int = 0,
        replay: Callable[[Episode], bool] | None = None,
        recover: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._environments = environments
        self._sessions = sessions
        self._gate = gate
        self._opening = opening
        self._concurrency = concurrency
        self._bounds = bounds or Bounds()
        self._retries = retries
        self._replay = replay or environment_lost
        self._recover = recover

    async def run(
        self,
        attempts: Sequence[Attempt],
        *,
        limits: Limits,
        temperature: float | None,
        on_end: Callable[[Episode], None] = lambda episode: None,
    ) -> list[Episode]:
        """Run all attempts; the episodes come back in the same order.

        An episode that the infrastructure failed has reward ``None`` and the cause; it does not disturb the
        others. ``info["attempts"]`` says how often an episode was played, ``info["lost"]`` what became of all
        attempts but the last, whose ``timings`` and ``segments`` are the episode's. Cancelling this cancels every
        episode and returns when all of them have closed what they held.

        Raises:
            TaskError, ConfigError: a task that the environment can never run; the other episodes are cancelled.
            HungError: the engine does not answer any more.
        """
        pulse = Pulse(self._bounds)
        episodes: list[Episode] = []
        if self._gate is None:
            slots = asyncio.Semaphore(self._concurrency)
            episodes = await self._wave(attempts, slots, pulse, limits, temperature, on_end)
            await self._settle(pulse)
            return episodes
        for start in range(0, len(attempts), self._concurrency):
            wave = attempts[start : start + self._concurrency]
            # all enter before any starts: the first batch must wait for the slowest sandbox of the wave
            for attempt in wave:
                self._gate.enter(attempt.order)
            try:
                episodes += await self._wave(wave, asyncio.Semaphore(len(wave)), pulse, limits, temperature, on_end)
            finally:
                for attempt in wave:
                    self._gate.leave(attempt.order)
            if pulse.cut is not None:
                await self._settle(pulse)
        await self._settle(pulse)
        return episodes

    async def _settle(self, pulse: Pulse) -> None:
        try:
            await within(min(_SETTLE_S, pulse.bounds.engine_s), self._sessions.settle())
        except TimeoutError:
            raise HungError(
                f"the engine does not answer any more{f' ({pulse.cut})' if pulse.cut else ''}",
                hint="--resume goes on from what is on disk",
            ) from None

    async def _wave(
        self,
        attempts: Sequence[Attempt],
        slots: asyncio.Semaphore,
        pulse: Pulse,
        limits: Limits,
        temperature: float | None,
        on_end: Callable[[Episode], None],
    ) -> list[Episode]:
        async def one(attempt: Attempt) -> Episode:
            try:
                async with slots:
                    episode = await self._episode(attempt, pulse, limits, temperature)
            except asyncio.CancelledError:
                this = asyncio.current_task()
                if pulse.cut is None or this is None or this.uncancel() > 0:
                    raise
                episode = _cut_off(attempt, pulse)
            finally:
                if self._gate is not None:
                    self._gate.leave(attempt.order)
            on_end(episode)
            return episode

        def cut_off() -> None:
            for task in running:
                task.cancel()

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(attempt)) for attempt in attempts]
                watching = tasks.create_task(pulse.watch(cut_off))
                if running:
                    await asyncio.wait(running)
                watching.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in running]

    async def _episode(self, attempt: Attempt, pulse: Pulse, limits: Limits, temperature: float | None) -> Episode:
        lost: list[dict[str, Any]] = []
        while True:
            last = len(lost) >= self._retries or pulse.cut is not None
            episode, again = await self._once(attempt, pulse, limits, temperature, last=last)
            if not again:
                break
            lost.append(_loss(episode))
            if self._recover is not None:
                await pulse.elsewhere(self._recover())
        episode.info["attempts"] = len(lost) + 1
        if lost:
            episode.info["lost"] = lost
        return episode

    async def _once(
        self, attempt: Attempt, pulse: Pulse, limits: Limits, temperature: float | None, *, last: bool
    ) -> tuple[Episode, bool]:
        """One attempt in a policy session and an environment of its own, both closed after it; and whether it is
        to be played again."""
        try:
            async with (
                self._sessions.open(attempt.order, temperature=temperature) as session,
                closing(
                    BoundedEnvironment(self._environments.create(), pulse, command_timeout_s=limits.command_timeout_s)
                ) as environment,
            ):
                episode = await run_episode(
                    environment,
                    WatchedPolicy(session.policy, pulse),
                    task_id=attempt.task_id,
                    opening=self._opening,
                    limits=limits,
                    seed=attempt.seed,
                )
                again = self._replay(episode) and not last
                # one that is played again stays in the gate: which batch its first turn joins is no matter of timing
                if self._gate is not None and not again:
                    self._gate.leave(attempt.order)
                episode.segments = tuple(session.segments())
                episode.info["capture"] = session.counters()
                return episode, again
        except (TaskError, ConfigError):
            raise
        except TermrlError as error:
            failed = _failed(attempt, error)
            return failed, self._replay(failed) and not last


def environment_lost(episode: Episode) -> bool:
    """Whether the episode has no reward for a reason that another environment may not have."""
    return episode.reward is None and episode.verdict is not None and episode.verdict.cause in REPLAYED_CAUSES


def _loss(episode: Episode) -> dict[str, Any]:
    """What is kept of an attempt that is played again."""
    return {
        "cause": cause_of(episode),
        "error": episode.error,
        "turns": len(episode.turns),
        "tokens": sampled_tokens(episode),
        "seconds": episode.timings.get("total_s", 0.0),
    }


def _cut_off(attempt: Attempt, pulse: Pulse) -> Episode:
    """An episode that its phase did not wait for."""
    why = pulse.cut or ""
    return Episode(
        task_id=attempt.task_id,
        seed=attempt.seed,
        end_reason=EndReason.POLICY_ERROR if pulse.engine_silent else EndReason.ABORTED,
        verdict=Verdict.missing(Cause.ENGINE_ERROR if pulse.engine_silent else Cause.CANCELLED, why),
        error=why,
    )


def _failed(attempt: Attempt, error: TermrlError) -> Episode:
    """An episode that never came about or whose end was lost: no reward, whatever happened in it."""
    sandbox = isinstance(error, SandboxError)
    cause = Cause(error.cause) if isinstance(error, SandboxError) else Cause.ENGINE_ERROR
    return Episode(
        task_id=attempt.task_id,
        seed=attempt.seed,
        end_reason=EndReason.ENVIRONMENT_ERROR if sandbox else EndReason.POLICY_ERROR,
        verdict=Verdict.missing(cause, error.message),
        error=error.message,
    )
