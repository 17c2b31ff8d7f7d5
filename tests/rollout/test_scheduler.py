from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from termrl.agent.types import Limits, Message, Opening, Reply
from termrl.capture.segments import Segment
from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.errors import CaptureError, PolicyError, SandboxStartError, TaskError
from termrl.rollout.scheduler import Attempt, PolicySession, Scheduler
from termrl.verifier.verdict import Cause, EndReason, Outcome, Verdict


class World:
    """What the fakes of one test share: what is open now, and what happened."""

    def __init__(self) -> None:
        self.environments = 0
        self.sessions = 0
        self.most_environments = 0
        self.entered: list[int] = []
        self.inside: set[int] = set()
        self.seen_at_first_turn: list[frozenset[int]] = []
        self.closing_s: list[float] = []

    # the gate
    def enter(self, order: int) -> None:
        self.entered.append(order)
        self.inside.add(order)

    def leave(self, order: int) -> None:
        self.inside.discard(order)


class FakePolicy:
    def __init__(self, world: World, order: int, fault: str) -> None:
        self.world, self.order, self.fault, self.turn = world, order, fault, 0

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        if self.turn == 0:
            self.world.seen_at_first_turn.append(frozenset(self.world.inside))
        self.turn += 1
        await asyncio.sleep(0.01)
        if self.fault == "policy":
            raise PolicyError("the engine is gone")
        if self.fault == "hang":
            await asyncio.sleep(60)
        text = "```bash\ntrue\n```" if self.turn == 1 else "TASK_COMPLETE"
        return Reply({"role": "assistant", "content": text}, text, "stop")


class FakeEnvironment(Environment):
    def __init__(self, world: World) -> None:
        self.world = world
        world.environments += 1
        world.most_environments = max(world.most_environments, world.environments)
        self.open = True
        self.closing_s = world.closing_s.pop(0) if world.closing_s else 0.01

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        if task_id == "no-sandbox":
            raise SandboxStartError("no memory left")
        if task_id == "unknown":
            raise TaskError("no task named unknown")
        return Observation(instruction=f"do {task_id}")

    async def step(self, action: Action) -> Observation:
        if action.action_type == "evaluate":
            verdict = Verdict(outcome=Outcome.PASSED, raw_reward=1.0)
            return Observation(reward=1.0, done=True, info={"verdict": verdict.model_dump(mode="json")})
        return Observation(output="ok", info={"exit_code": 0})

    def state(self) -> State:
        return State()

    async def close(self) -> None:
        await asyncio.sleep(self.closing_s)
        if self.open:
            self.open = False
            self.world.environments -= 1


class FakeSessions:
    def __init__(self, world: World, faults: dict[int, str]) -> None:
        self.world, self.faults = world, faults

    @asynccontextmanager
    async def open(self, order: int, *, temperature: float) -> AsyncIterator[PolicySession]:
        self.world.sessions += 1
        fault = self.faults.get(order, "")

        def segments() -> list[Segment]:
            if fault == "record":
                raise CaptureError("no logprobs")
            return [Segment(str(order), (1, 2), (0, 1), (0.0, -0.5), (-1, 0), temperature, 1)]

        try:
            yield PolicySession(FakePolicy(self.world, order, fault), segments, lambda: {"branches": 0})
        finally:
            self.world.sessions -= 1

    async def settle(self) -> None:
        assert self.world.sessions == 0


class FakeEnvironments:
    def __init__(self, world: World) -> None:
        self.world = world

    def create(self) -> Environment:
        return FakeEnvironment(self.world)


def scheduler(
    world: World, *, faults: dict[int, str] | None = None, gate: bool = True, concurrency: int = 16
) -> Scheduler:
    return Scheduler(
        environments=FakeEnvironments(world),
        sessions=FakeSessions(world, faults or {}),
        gate=world if gate else None,
        opening=Opening(()),
        concurrency=concurrency,
    )


def attempts(count: int, tasks: dict[int, str] | None = None) -> list[Attempt]:
    return [Attempt((tasks or {}).get(n, f"task-{n}"), "family", 0, n, seed=n, order=n) for n in range(count)]


LIMITS = Limits(max_turns=3)


async def test_episodes_come_back_in_order_with_their_tokens_and_everything_is_closed() -> None:
    world = World()
    ended: list[str] = []
    episodes = await scheduler(world).run(
        attempts(5), limits=LIMITS, temperature=0.7, on_end=lambda e: ended.append(e.task_id)
    )
    assert [e.task_id for e in episodes] == [f"task-{n}" for n in range(5)]
    assert [e.segments[0].session_id for e in episodes] == [str(n) for n in range(5)]
    assert all(e.reward == 1.0 and e.segments[0].temperature == 0.7 for e in episodes)
    assert sorted(ended) == [f"task-{n}" for n in range(5)]
    assert (world.environments, world.sessions, world.inside) == (0, 0, set())


async def test_in_lockstep_every_episode_has_entered_before_the_first_turn() -> None:
    world = World()
    await scheduler(world).run(attempts(6), limits=LIMITS, temperature=1.0)
    assert world.seen_at_first_turn[0] == frozenset(range(6))


async def test_in_lockstep_waves_do_not_depend_on_timing() -> None:
    world = World()
    await scheduler(world, concurrency=4).run(attempts(10), limits=LIMITS, temperature=1.0)
    assert world.most_environments == 4
    assert world.entered == list(range(10))
    assert world.seen_at_first_turn[4] == frozenset({4, 5, 6, 7})
    assert world.seen_at_first_turn[8] == frozenset({8, 9})


async def test_without_a_gate_no_more_than_concurrency_are_alive() -> None:
    world = World()
    episodes = await scheduler(world, gate=False, concurrency=3).run(attempts(10), limits=LIMITS, temperature=1.0)
    assert len(episodes) == 10
    assert world.most_environments == 3
    assert world.entered == []


@pytest.mark.parametrize(
    ("fault", "task", "end_reason", "cause"),
    [
        ("policy", None, EndReason.POLICY_ERROR, Cause.ENGINE_ERROR),
        ("record", None, EndReason.POLICY_ERROR, Cause.ENGINE_ERROR),
        ("", "no-sandbox", EndReason.ENVIRONMENT_ERROR, Cause.SANDBOX_START),
    ],
)
async def test_a_failed_episode_has_no_reward_and_does_not_disturb_the_others(
    fault: str, task: str | None, end_reason: EndReason, cause: Cause
) -> None:
    world = World()
    run = scheduler(world, faults={1: fault}).run(
        attempts(4, {1: task} if task else None), limits=LIMITS, temperature=1.0
    )
    episodes = await run
    assert [e.reward for e in episodes] == [1.0, None, 1.0, 1.0]
    assert episodes[1].end_reason is end_reason
    assert episodes[1].verdict is not None
    assert episodes[1].verdict.cause is cause
    assert (world.environments, world.sessions, world.inside) == (0, 0, set())


async def test_an_episode_that_is_cancelled_while_it_closes_is_waited_for() -> None:
    world = World()
    world.closing_s = [0.02, 0.3]
    with pytest.raises(TaskError):
        await scheduler(world, gate=False).run(
            attempts(2, {0: "unknown", 1: "unknown"}), limits=LIMITS, temperature=1.0
        )
    assert world.environments == 0


async def test_a_task_that_can_never_run_ends_the_whole_call_and_closes_everything() -> None:
    world = World()
    with pytest.raises(TaskError, match="no task named unknown"):
        await scheduler(world, faults={0: "hang"}).run(attempts(3, {2: "unknown"}), limits=LIMITS, temperature=1.0)
    assert (world.environments, world.sessions, world.inside) == (0, 0, set())


async def test_cancelling_closes_everything_before_it_returns() -> None:
    world = World()
    faults = dict.fromkeys(range(4), "hang")
    running = asyncio.create_task(scheduler(world, faults=faults).run(attempts(4), limits=LIMITS, temperature=1.0))
    await asyncio.sleep(0.1)
    assert world.environments == 4
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (world.environments, world.sessions, world.inside) == (0, 0, set())
