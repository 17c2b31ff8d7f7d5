"""An episode that loses its environment is played again in a new policy session: bounded, counted, never a 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from termrl.agent.types import Episode, Limits, Message, Opening, Reply
from termrl.capture.segments import Segment
from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.errors import CapacityError, EnvironmentLostError, ImageError, SandboxLostError, SandboxStartError
from termrl.rollout.bounded import Bounds
from termrl.rollout.groups import Group, build_batch
from termrl.rollout.scheduler import Attempt, PolicySession, Scheduler
from termrl.runs.metrics import RunTotals, rollout_metrics
from termrl.verifier.verdict import Cause, EndReason, Outcome, Verdict

LIMITS = Limits(max_turns=3)
OPENING = Opening(())
Fault = tuple[str, Exception | None]  # where it strikes (reset, exec, evaluate), and what; ``None``: it never answers


class FakeGate:
    """The engine's rule: a batch of turns begins when all who entered ask for one. ``batches`` has the orders."""

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.batches: list[list[int]] = []
        self.waiting: dict[int, asyncio.Future[None]] = {}

    def enter(self, order: int) -> None:
        self.inside.add(order)

    def leave(self, order: int) -> None:
        self.inside.discard(order)
        self.look()

    async def turn(self, order: int) -> None:
        begun = self.waiting[order] = asyncio.get_running_loop().create_future()
        self.look()
        await begun

    def look(self) -> None:
        if self.waiting and self.inside <= set(self.waiting):
            self.batches.append(sorted(self.waiting))
            for future in self.waiting.values():
                future.set_result(None)
            self.waiting = {}


class FakeWorld:
    """Gives environments that fail as ``faults`` say: for each task the faults of its first, second, … environment."""

    def __init__(self, faults: dict[str, list[Fault]], *, gate: FakeGate | None = None, delay_s: float = 0.0) -> None:
        self.faults, self.gate, self.delay_s = faults, gate, delay_s
        self.sessions: list[int] = []
        self.open_sessions: set[int] = set()
        self.open_environments = 0
        self.seeds: list[int | None] = []

    def create(self) -> Environment:
        return FakeEnvironment(self)

    @asynccontextmanager
    async def open(self, order: int, *, temperature: float) -> AsyncIterator[PolicySession]:
        number = len(self.sessions)
        self.sessions.append(order)
        self.open_sessions.add(number)
        policy = FakePolicy(self, order)

        def segments() -> list[Segment]:
            n = policy.turns
            return [Segment(str(number), (1,) * n, (1,) * n, (-0.5,) * n, (0,) * n, temperature, n)]

        try:
            yield PolicySession(policy, segments, lambda: {"branches": 0})
        finally:
            self.open_sessions.discard(number)

    async def settle(self) -> None:
        assert not self.open_sessions

    def scheduler(self, *, retries: int = 1, recover: Callable[[], Awaitable[None]] | None = None) -> Scheduler:
        return Scheduler(
            environments=self,
            sessions=self,
            gate=self.gate,
            opening=OPENING,
            concurrency=16,
            bounds=Bounds(reset_s=0.2, grace_s=0.2, engine_s=5.0, phase_s=20.0),
            retries=retries,
            recover=recover,
        )

    async def play(
        self, count: int, *, retries: int = 1, on_end: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        attempts = [Attempt(f"task-{n}", "family", 0, n, seed=n, order=n) for n in range(count)]
        limits = Limits(max_turns=3, command_timeout_s=0.2)
        run = self.scheduler(retries=retries).run(
            attempts, limits=limits, temperature=1.0, on_end=on_end or (lambda episode: None)
        )
        return await asyncio.wait_for(run, 30)


class FakePolicy:
    def __init__(self, world: FakeWorld, order: int) -> None:
        self.world, self.order, self.turns = world, order, 0

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        if self.world.gate is not None:
            await self.world.gate.turn(self.order)
        self.turns += 1
        self.world.seeds.append(seed)
        text = "```bash\ntrue\n```" if self.turns == 1 else "TASK_COMPLETE"
        return Reply({"role": "assistant", "content": text}, text, "stop")


class FakeEnvironment(Environment):
    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.fault: Fault = ("", None)
        world.open_environments += 1

    async def strike(self, where: str) -> None:
        await asyncio.sleep(self.world.delay_s)
        if self.fault[0] != where:
            return
        if self.fault[1] is None:
            await asyncio.sleep(60)
        else:
            raise self.fault[1]

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        faults = self.world.faults.get(task_id, [])
        self.fault = faults.pop(0) if faults else ("", None)
        await self.strike("reset")
        return Observation(instruction=f"do {task_id}", info={"verifier_timeout_sec": 0.2})

    async def step(self, action: Action) -> Observation:
        await self.strike(action.action_type)
        if action.action_type == "evaluate":
            verdict = Verdict(outcome=Outcome.PASSED, raw_reward=1.0)
            return Observation(reward=1.0, done=True, info={"verdict": verdict.model_dump(mode="json")})
        return Observation(output="ok", info={"exit_code": 0})

    def state(self) -> State:
        return State()

    async def close(self) -> None:
        self.world.open_environments -= 1


@pytest.mark.parametrize(
    ("where", "error", "cause"),
    [
        ("reset", SandboxStartError("no memory"), Cause.SANDBOX_START),
        ("reset", CapacityError("8 of 8 sessions"), Cause.CAPACITY),
        ("reset", None, Cause.ENVIRONMENT_LOST),
        ("reset", ConnectionRefusedError(111, "refused"), Cause.ENVIRONMENT_LOST),
        ("exec", SandboxLostError("it died"), Cause.SANDBOX_LOST),
        ("exec", EnvironmentLostError("the server closed"), Cause.ENVIRONMENT_LOST),
        ("exec", None, Cause.ENVIRONMENT_LOST),
        ("evaluate", EnvironmentLostError("the server closed"), Cause.ENVIRONMENT_LOST),
        ("evaluate", SandboxLostError("it died"), Cause.SANDBOX_LOST),
    ],
)
async def test_an_episode_that_loses_its_environment_is_played_again_in_a_new_session(
    where: str, error: Exception | None, cause: Cause
) -> None:
    world = FakeWorld({"task-1": [(where, error)]}, gate=FakeGate())
    ended: list[str] = []
    episodes = await world.play(3, on_end=lambda episode: ended.append(episode.task_id))
    assert [episode.reward for episode in episodes] == [1.0, 1.0, 1.0]
    assert [episode.info["attempts"] for episode in episodes] == [1, 2, 1]
    assert ["lost" in episode.info for episode in episodes] == [False, True, False]
    (loss,) = episodes[1].info["lost"]
    assert loss["cause"] == cause and loss["error"]
    assert (loss["turns"], loss["tokens"]) == {"reset": (0, 0), "exec": (1, 1), "evaluate": (2, 2)}[where]
    assert sorted(world.sessions) == [0, 1, 1, 2] and world.sessions[-1] == 1
    assert episodes[1].segments[0].session_id == "3", "the tokens are the new session's alone"
    assert episodes[1].segments[0].token_ids == (1, 1) and len(episodes[1].turns) == 2
    assert sorted(ended) == ["task-0", "task-1", "task-2"], "an episode ends once"
    assert (world.open_environments, world.open_sessions) == (0, set())


async def test_the_same_seeds_are_drawn_again() -> None:
    undisturbed, hurt = FakeWorld({}), FakeWorld({"task-0": [("evaluate", SandboxLostError("it died"))]})
    await undisturbed.play(1)
    await hurt.play(1)
    assert hurt.seeds == undisturbed.seeds * 2


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_retries_are_bounded_and_what_stays_lost_has_no_reward_but_the_cause(retries: int) -> None:
    world = FakeWorld({"task-0": [("exec", EnvironmentLostError("gone"))] * 9}, gate=FakeGate())
    episodes = await world.play(2, retries=retries)
    assert [episode.reward for episode in episodes] == [None, 1.0]
    assert episodes[0].end_reason is EndReason.ENVIRONMENT_ERROR
    assert episodes[0].verdict is not None and episodes[0].verdict.cause is Cause.ENVIRONMENT_LOST
    assert episodes[0].info["attempts"] == retries + 1
    assert len(episodes[0].info.get("lost", [])) == retries
    assert (world.open_environments, world.open_sessions) == (0, set())


async def test_what_another_environment_would_not_change_is_not_played_again() -> None:
    faults: dict[str, list[Fault]] = {"task-0": [("reset", ImageError("no such image"))]}
    world = FakeWorld(faults)
    (episode,) = await world.play(1, retries=3)
    assert (episode.reward, episode.info["attempts"], len(world.sessions)) == (None, 1, 1)


async def test_in_lockstep_the_others_wait_and_the_batches_are_the_same_whatever_the_timing() -> None:
    def faults() -> dict[str, list[Fault]]:
        return {"task-1": [("exec", SandboxLostError("it died"))], "task-3": [("reset", SandboxStartError("no"))]}

    batches = []
    for delay_s in (0.0, 0.03):
        gate = FakeGate()
        episodes = await FakeWorld(faults(), gate=gate, delay_s=delay_s).play(4)
        assert [episode.reward for episode in episodes] == [1.0] * 4
        batches.append(gate.batches)
        assert not gate.inside
    assert batches[0] == batches[1] == [[0, 1, 2, 3], [0, 1, 2, 3], [1]]


async def test_the_gate_is_left_when_the_last_attempt_is_lost_so_that_no_one_waits_for_ever() -> None:
    gate = FakeGate()
    world = FakeWorld({"task-0": [("exec", SandboxLostError("it died"))] * 2}, gate=gate)
    episodes = await world.play(2)
    assert [episode.reward for episode in episodes] == [None, 1.0]
    assert gate.batches == [[0, 1], [0, 1]]
    assert not gate.inside


async def test_a_retry_comes_only_after_environments_can_be_had_again() -> None:
    world = FakeWorld({"task-0": [("exec", EnvironmentLostError("gone"))]})
    seen: list[tuple[int, int]] = []

    async def recover() -> None:
        seen.append((world.open_environments, len(world.sessions)))
        await asyncio.sleep(0.01)

    attempts = [Attempt("task-0", "family", 0, 0, seed=0, order=0)]
    (episode,) = await world.scheduler(recover=recover).run(attempts, limits=LIMITS, temperature=1.0)
    assert seen == [(0, 1)], "the lost environment is closed before, and no new session is open yet"
    assert episode.reward == 1.0


async def test_a_cancelled_run_plays_nothing_again() -> None:
    world = FakeWorld({"task-0": [("exec", EnvironmentLostError("gone"))]})

    async def recover() -> None:
        await asyncio.sleep(60)

    attempts = [Attempt("task-0", "family", 0, 0, seed=0, order=0)]
    running = asyncio.create_task(world.scheduler(recover=recover).run(attempts, limits=LIMITS, temperature=1.0))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(world.sessions) == 1
    assert (world.open_environments, world.open_sessions) == (0, set())


async def test_retries_and_losses_are_counted_by_cause() -> None:
    faults: dict[str, list[Fault]] = {
        "task-0": [("exec", EnvironmentLostError("gone"))],
        "task-1": [("exec", SandboxLostError("died")), ("reset", SandboxStartError("no"))],
    }
    episodes = await FakeWorld(faults).play(3)
    groups = [Group(0, "task", "family", tuple(episodes))]
    batch = build_batch(groups)
    metrics = rollout_metrics(groups, batch)
    assert metrics["rollout/episodes"] == 3
    assert metrics["rollout/raw_reward"] == 1.0, "over the two that have a verdict"
    counted = {name: value for name, value in metrics.items() if "retried" in name or "dropped" in name}
    assert counted == {
        "rollout/episodes_retried/environment_lost": 1,
        "rollout/episodes_retried/sandbox_lost": 1,
        "rollout/episodes_dropped/sandbox_start": 1,
    }
    totals = RunTotals()
    totals.add(metrics, batch)
    again = RunTotals.from_state(totals.state())
    assert again.retried == {"environment_lost": 1, "sandbox_lost": 1}
    assert RunTotals.from_state({**totals.state(), "retried": {}}).retried == {}
