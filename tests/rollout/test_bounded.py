from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from termrl.agent.types import Limits, Message, Opening, Reply
from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.errors import HungError
from termrl.rollout.bounded import Bounds, within
from termrl.rollout.scheduler import Attempt, PolicySession, Scheduler
from termrl.verifier.verdict import Cause, EndReason, Outcome, Verdict

PASSED = Verdict(outcome=Outcome.PASSED, raw_reward=1.0).model_dump(mode="json")
LIMITS = Limits(max_turns=2, command_timeout_s=0.1, verify_timeout_s=0.05)


async def never() -> None:
    """Does not return, and ignores that it is cancelled (once: the test's event loop has to end)."""
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)


class FakeEnvironment(Environment):
    def __init__(self) -> None:
        self.hangs_in = ""

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        self.hangs_in = task_id.removeprefix("hangs-in-")
        if self.hangs_in == "reset":
            await never()
        return Observation(instruction="do it")

    async def step(self, action: Action) -> Observation:
        if self.hangs_in == action.action_type:
            await never()
        if action.action_type == "evaluate":
            return Observation(reward=1.0, done=True, info={"verdict": PASSED})
        await asyncio.sleep(0.03)
        return Observation(output="ok", info={"exit_code": 0})

    def state(self) -> State:
        return State()

    async def close(self) -> None:
        if self.hangs_in == "close":
            await never()


class FakeEnvironments:
    def create(self) -> Environment:
        return FakeEnvironment()


class FakePolicy:
    def __init__(self, silent: bool, slow_s: float) -> None:
        self.silent, self.slow_s, self.turns = silent, slow_s, 0

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        self.turns += 1
        await asyncio.sleep(3600 if self.silent else self.slow_s)
        text = "```bash\ntrue\n```" if self.turns == 1 else "TASK_COMPLETE"
        return Reply({"role": "assistant", "content": text}, text, "stop")


class FakeSessions:
    def __init__(self, *, silent_after: int, settles: bool, slow_s: float) -> None:
        self.silent_after, self.settles, self.slow_s = silent_after, settles, slow_s

    @asynccontextmanager
    async def open(self, order: int, *, temperature: float) -> AsyncIterator[PolicySession]:
        yield PolicySession(FakePolicy(order >= self.silent_after, self.slow_s), list, dict)

    async def settle(self) -> None:
        if not self.settles:
            await never()


def scheduler(
    bounds: Bounds, *, silent_after: int = 99, settles: bool = True, slow_s: float = 0.0, concurrency: int = 8
) -> Scheduler:
    return Scheduler(
        environments=FakeEnvironments(),
        sessions=FakeSessions(silent_after=silent_after, settles=settles, slow_s=slow_s),
        gate=None,
        opening=Opening(()),
        concurrency=concurrency,
        bounds=bounds,
    )


def attempts(*tasks: str) -> list[Attempt]:
    return [Attempt(task, "family", 0, n, seed=n, order=n) for n, task in enumerate(tasks)]


@pytest.mark.parametrize(
    ("call", "end_reason"),
    [
        ("reset", EndReason.ENVIRONMENT_ERROR),
        ("exec", EndReason.ENVIRONMENT_ERROR),
        ("evaluate", EndReason.TASK_COMPLETE),
    ],
)
async def test_an_environment_that_never_returns_is_lost_and_the_others_go_on(call: str, end_reason: EndReason) -> None:
    bounds = Bounds(reset_s=0.2, grace_s=0.1)
    episodes = await scheduler(bounds).run(attempts("a", f"hangs-in-{call}", "b"), limits=LIMITS, temperature=1.0)
    assert [e.reward for e in episodes] == [1.0, None, 1.0]
    lost = episodes[1]
    assert lost.end_reason is end_reason
    assert lost.verdict is not None
    assert lost.verdict.cause is Cause.ENVIRONMENT_LOST
    assert f"did not come back from {call} in" in lost.error


async def test_waiting_for_a_slot_is_no_slow_reset() -> None:
    class Queued(FakeEnvironment):
        admission_s = 2.0

        async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
            await asyncio.sleep(0.4)
            return Observation(instruction="do it", info={"admission_s": 0.38})

    class Environments:
        def create(self) -> Environment:
            return Queued()

    running = scheduler(Bounds(reset_s=0.2, grace_s=0.1))
    running._environments = Environments()
    (episode,) = await running.run(attempts("a"), limits=LIMITS, temperature=1.0)
    assert episode.reward == 1.0
    assert episode.timings["admission_s"] == 0.38 and episode.timings["reset_s"] < 0.2


async def test_an_environment_that_never_closes_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termrl.rollout.bounded._CLOSE_S", 0.1)
    episodes = await scheduler(Bounds()).run(attempts("hangs-in-close", "b"), limits=LIMITS, temperature=1.0)
    assert [e.reward for e in episodes] == [1.0, 1.0]


async def test_an_engine_that_falls_silent_ends_the_phase_with_its_cause() -> None:
    episodes = await scheduler(Bounds(engine_s=0.4), silent_after=2).run(
        attempts("a", "b", "c", "d"), limits=LIMITS, temperature=1.0
    )
    assert [e.reward for e in episodes] == [1.0, 1.0, None, None]
    for episode in episodes[2:]:
        assert episode.end_reason is EndReason.POLICY_ERROR
        assert episode.verdict is not None
        assert episode.verdict.cause is Cause.ENGINE_ERROR
        assert episode.error == "the engine gave no turn in 0.4 s"


async def test_an_engine_that_stays_silent_ends_the_run() -> None:
    running = scheduler(Bounds(engine_s=0.3), silent_after=0, settles=False).run(
        attempts("a"), limits=LIMITS, temperature=1.0
    )
    with pytest.raises(HungError, match=r"does not answer any more \(the engine gave no turn in 0.3 s\)"):
        await running


async def test_slow_turns_are_no_silence() -> None:
    episodes = await scheduler(Bounds(engine_s=0.6), slow_s=0.4).run(attempts("a", "b"), limits=LIMITS, temperature=1.0)
    assert [e.reward for e in episodes] == [1.0, 1.0]


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_a_phase_over_its_bound_keeps_what_has_ended(concurrency: int) -> None:
    started = time.monotonic()
    running = scheduler(Bounds(phase_s=0.6), silent_after=1, concurrency=concurrency)
    episodes = await running.run(attempts("a", "b", "c"), limits=LIMITS, temperature=1.0)
    assert time.monotonic() - started < 5
    assert [e.reward for e in episodes] == [1.0, None, None]
    for episode in episodes[1:]:
        assert episode.verdict is not None
        assert (episode.end_reason, episode.verdict.cause) == (EndReason.ABORTED, Cause.CANCELLED)


async def test_cancelling_a_phase_that_is_being_watched_cancels_it() -> None:
    running = asyncio.create_task(
        scheduler(Bounds(), silent_after=0).run(attempts("a", "b"), limits=LIMITS, temperature=1.0)
    )
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_bounded_call_passes_results_errors_and_cancellation_on() -> None:
    async def answer() -> int:
        return 7

    async def fail() -> int:
        raise ValueError("no")

    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    assert await within(1.0, answer()) == 7
    with pytest.raises(ValueError, match="no"):
        await within(1.0, fail())
    with pytest.raises(TimeoutError):
        await within(0.01, never())
    task = asyncio.create_task(within(60, wait()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
