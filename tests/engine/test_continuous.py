"""The continuous schedule: requests join a running batch between its decode steps."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from termrl.capture.upstreams import GenerateRequest, GenerateResult
from termrl.engine.running import Ended, RunningBatch
from termrl.engine.transformers import EmbeddedEngine
from termrl.engine.upstream import EmbeddedUpstream
from termrl.errors import PolicyError
from tests.engine.test_generate import SHARED, a_batch, assert_exact, assert_same, engine_of, ids, next_turn, request
from tests.engine.tiny import KINDS


def run_out(batch: RunningBatch, into: dict[str, GenerateResult]) -> None:
    """Step until no row is left."""
    while batch.rows:
        step_into(batch, into)


def step_into(batch: RunningBatch, into: dict[str, GenerateResult]) -> None:
    for ended in batch.step():
        into[ended.request.session_id] = GenerateResult(ended.token_ids, ended.logprobs, ended.reason, 0)
        assert ended.service_s >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_request_is_done_while_an_earlier_one_runs_and_both_are_exact(
    kind: str, folders: dict[str, Path], references: dict[str, torch.nn.Module]
) -> None:
    engine = engine_of(folders[kind])
    batch = engine.running_batch()
    early, late = request("early", ids(30, 1), max_tokens=60), request("late", ids(50, 2), max_tokens=5)
    done: dict[str, GenerateResult] = {}
    batch.join([early])
    for _ in range(4):
        step_into(batch, done)
    batch.join([late])
    for _ in range(5):
        step_into(batch, done)
    assert set(done) == {"late"}
    assert batch.rows == 1
    run_out(batch, done)
    assert len(done["early"].token_ids) == 60
    assert_exact(references[kind], [early, late], [done["early"], done["late"]])
    batch.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_turns_that_join_at_random_steps_equal_those_of_an_engine_alone(
    folders: dict[str, Path], threads: int, seed: int
) -> None:
    rng = random.Random(seed)
    first = [replace(r, sampling=replace(r.sampling, max_tokens=rng.randrange(1, 20))) for r in a_batch(14)]
    alone = engine_of(folders["llama"])
    expected = [alone.generate([r])[0] for r in first]
    second = next_turn(first, expected)
    wanted = {r.session_id: alone.generate([r])[0] for r in second}

    engine = engine_of(folders["llama"], threads=threads)
    batch = engine.running_batch()
    got: dict[str, GenerateResult] = {}
    finals: dict[str, GenerateResult] = {}
    waiting, follow = list(first), {r.session_id: r for r in second}
    while waiting or batch.rows:
        take = rng.randrange(4)
        batch.join(waiting[:take])
        waiting = waiting[take:]
        for ended in batch.step():
            name = ended.request.session_id
            result = GenerateResult(ended.token_ids, ended.logprobs, ended.reason, 0)
            if name in follow:
                got[name] = result
                waiting.append(follow.pop(name))
            else:
                finals[name] = result
    assert_same([got[r.session_id] for r in first], expected)
    assert_same([finals[r.session_id] for r in second], [wanted[r.session_id] for r in second])
    assert engine.stats.reused_tokens > 0
    assert engine.stats.decoded_tokens == sum(len(r.token_ids) for r in [*got.values(), *finals.values()])
    batch.close()


def test_prompts_that_begin_alike_share_what_the_second_one_computed(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    batch = engine.running_batch()
    done: dict[str, GenerateResult] = {}
    for index in range(4):
        batch.join([request(f"s{index}", SHARED + ids(6, index), max_tokens=30)])
        step_into(batch, done)
    assert engine.stats.reused_tokens == 3 * len(SHARED)
    run_out(batch, done)
    batch.close()


def test_rows_that_do_not_fit_in_memory_wait_for_those_before_them(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"], max_kv_tokens=100)
    batch = engine.running_batch()
    done: dict[str, GenerateResult] = {}
    requests = [request(f"s{i}", ids(30, i), max_tokens=12) for i in range(5)]
    batch.join(requests)
    most = 0
    while batch.rows:
        step_into(batch, done)
        most = max(most, sum(len(shard.live) for shard in batch._shards))
    assert most == 2
    assert_same([done[r.session_id] for r in requests], engine_of(folders["llama"]).generate(requests))
    batch.close()


# -- behind the upstream --------------------------------------------------------------------------------------------


class SlowBatch(RunningBatch):
    """The real batch; each step waits for the test's leave, so that nothing depends on speed."""

    gate: threading.Semaphore
    failure: Exception | None = None

    def step(self) -> list[Ended]:
        assert self.gate.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure
        return super().step()


class SteppedEngine(EmbeddedEngine):
    """The real engine, whose batches go on step by step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, threads=1)
        self.gate = threading.Semaphore(0)
        self.made: list[SlowBatch] = []

    def running_batch(self, cancelled: Callable[[GenerateRequest], bool] | None = None) -> RunningBatch:
        batch = super().running_batch(cancelled)
        batch.__class__ = SlowBatch
        assert isinstance(batch, SlowBatch)
        batch.gate = self.gate
        self.made.append(batch)
        return batch

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()


@pytest.fixture
def engine(folders: dict[str, Path]) -> SteppedEngine:
    return SteppedEngine(folders["llama"])


@pytest.fixture
async def upstream(engine: SteppedEngine) -> AsyncIterator[EmbeddedUpstream]:
    opened = EmbeddedUpstream(engine, schedule="continuous")
    yield opened
    engine.steps(10_000)
    await opened.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what is awaited happens in another thread)
            await asyncio.sleep(0.002)


async def test_a_late_call_begins_and_ends_before_an_earlier_one_has_ended(
    engine: SteppedEngine, upstream: EmbeddedUpstream
) -> None:
    early, late = request("early", ids(30, 1), max_tokens=60), request("late", ids(50, 2), max_tokens=5)
    first = asyncio.create_task(upstream.generate(early))
    engine.steps(10)
    await until(lambda: engine.stats.decoded_tokens == 10)
    second = asyncio.create_task(upstream.generate(late))
    await asyncio.sleep(0.01)
    engine.steps(6)  # one may have begun to wait without it
    got = await second
    assert not first.done()
    assert len(got.token_ids) == 5
    assert got.service_s is not None and got.queue_s is not None
    engine.steps(60)
    assert_same([await first, got], engine_of(engine.model_dir).generate([early, late]))


async def test_entered_episodes_are_not_waited_for(engine: SteppedEngine, upstream: EmbeddedUpstream) -> None:
    upstream.enter(7)
    engine.steps(100)
    assert (await upstream.generate(request("s", ids(9, 1)))).finish_reason == "length"


async def test_cancelling_a_running_call_leaves_the_others_alone_and_releases_it(
    engine: SteppedEngine, upstream: EmbeddedUpstream
) -> None:
    requests = a_batch(3)
    calls = [asyncio.create_task(upstream.generate(r)) for r in requests]
    engine.steps(3)
    await until(lambda: engine.stats.decoded_tokens >= 6)
    calls[1].cancel()
    await asyncio.sleep(0)
    released = asyncio.create_task(upstream.release(requests[1].session_id))
    engine.steps(100)
    await released
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    alone = engine_of(engine.model_dir).generate(requests)
    assert_same([results[0], results[2]], [alone[0], alone[2]])  # type: ignore[list-item]
    for r in (requests[0], requests[2]):
        await upstream.release(r.session_id)
    assert engine._cache.session(requests[1].session_id) is None


async def test_new_weights_wait_for_running_calls_and_later_calls_for_the_weights(
    engine: SteppedEngine, upstream: EmbeddedUpstream
) -> None:
    first = asyncio.create_task(upstream.generate(request("a", ids(20, 1))))
    engine.steps(2)
    await until(lambda: engine.stats.decoded_tokens == 2)
    renew = asyncio.create_task(upstream.set_weights({}, 3))
    await asyncio.sleep(0)
    second = asyncio.create_task(upstream.generate(request("b", ids(20, 2))))
    engine.steps(100)
    assert (await first).policy_version == 0
    await renew
    assert (await second).policy_version == 3


async def test_a_failing_step_ends_every_call_and_the_next_one_works(
    engine: SteppedEngine, upstream: EmbeddedUpstream
) -> None:
    calls = [asyncio.create_task(upstream.generate(r)) for r in a_batch(3)]
    engine.steps(1)
    await until(lambda: engine.stats.decoded_tokens > 0)
    engine.made[0].failure = RuntimeError("out of memory")
    engine.steps(1)
    for call in calls:
        with pytest.raises(PolicyError, match="RuntimeError: out of memory"):
            await call
    engine.steps(100)
    assert (await upstream.generate(a_batch(1)[0])).finish_reason == "length"


async def test_closing_ends_the_calls_and_the_threads(engine: SteppedEngine) -> None:
    upstream = EmbeddedUpstream(engine, schedule="continuous")
    calls = [asyncio.create_task(upstream.generate(r)) for r in a_batch(3, max_tokens=100)]
    engine.steps(2)
    await until(lambda: engine.stats.decoded_tokens > 0)
    closing = asyncio.create_task(upstream.aclose())
    await asyncio.sleep(0.01)
    engine.steps(1000)
    await closing
    for call in calls:
        with pytest.raises(PolicyError, match="closed"):
            await call
    assert not any(thread.name.startswith("termrl-engine") for thread in threading.enumerate())


async def test_calls_that_come_as_others_end_are_all_served(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"], threads=2)
    upstream = EmbeddedUpstream(engine, schedule="continuous")
    rng = random.Random(5)

    async def episode(i: int) -> None:
        current = request(f"s{i}", SHARED + ids(3 + i % 5, i), max_tokens=rng.randrange(1, 9))
        for _ in range(3):
            await asyncio.sleep(rng.random() * 0.03)
            done = await upstream.generate(current)
            current = next_turn([current], [done])[0]
        await upstream.release(current.session_id)

    async with asyncio.timeout(60):
        await asyncio.gather(*(episode(i) for i in range(12)))
    assert engine._cache._sessions == {}
    await upstream.aclose()
