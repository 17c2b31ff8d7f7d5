"""The engine behind the upstream protocol: the lock-step gate, cancelling, failing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from termrl.capture.upstreams import GenerateRequest, GenerateResult
from termrl.engine.transformers import EmbeddedEngine
from termrl.engine.upstream import EmbeddedUpstream
from termrl.errors import PolicyError
from tests.engine.test_generate import a_batch, assert_same, engine_of, ids, next_turn, request


class WatchedEngine(EmbeddedEngine):
    """The real engine, which notes its batches and can be held at the start of one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, threads=1)
        self.batches: list[list[int]] = []
        self.callers: set[int] = set()
        self.go = threading.Event()
        self.go.set()
        self.failure: Exception | None = None

    def generate(
        self, requests: Sequence[GenerateRequest], *, cancelled: Callable[[GenerateRequest], bool] | None = None
    ) -> list[GenerateResult]:
        self.batches.append([r.order for r in requests])
        self.callers.add(threading.get_ident())
        assert self.go.wait(20)
        if self.failure is not None:
            raise self.failure
        return super().generate(requests, cancelled=cancelled)


@pytest.fixture
def engine(folders: dict[str, Path]) -> WatchedEngine:
    return WatchedEngine(folders["llama"])


@pytest.fixture
async def upstream(engine: WatchedEngine) -> AsyncIterator[EmbeddedUpstream]:
    opened = EmbeddedUpstream(engine)
    yield opened
    engine.go.set()
    await opened.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what is awaited happens in another thread)
            await asyncio.sleep(0.002)


async def test_a_batch_starts_when_every_entered_episode_waits(
    engine: WatchedEngine, upstream: EmbeddedUpstream
) -> None:
    for order in range(3):
        upstream.enter(order)
    requests = a_batch(3)
    calls = [asyncio.create_task(upstream.generate(requests[i])) for i in (2, 0)]
    await asyncio.sleep(0.1)
    assert engine.batches == []
    results = [await upstream.generate(requests[1]), *(await asyncio.gather(*calls))]
    assert engine.batches == [[0, 1, 2]]
    assert_same([results[2], results[0], results[1]], engine_of(engine.model_dir).generate(requests))
    assert threading.get_ident() not in engine.callers


async def test_episodes_that_finish_turns_at_random_times_give_the_same_bits(folders: dict[str, Path]) -> None:
    async def phase(delays: Sequence[float]) -> list[list[GenerateResult]]:
        engine = WatchedEngine(folders["llama"])
        upstream = EmbeddedUpstream(engine)

        async def episode(i: int) -> list[GenerateResult]:
            turns, current = [], a_batch(4)[i]
            try:
                for turn in range(1 + i % 3):
                    await asyncio.sleep(delays[(i + turn) % len(delays)])
                    done = await upstream.generate(current)
                    turns.append(done)
                    current = next_turn([current], [done])[0]
            finally:
                upstream.leave(i)
            return turns

        for i in range(4):
            upstream.enter(i)
        turns = await asyncio.gather(*(episode(i) for i in range(4)))
        assert engine.batches == [[0, 1, 2, 3], [1, 2], [2]]
        await upstream.aclose()
        return turns

    assert await phase((0.0, 0.03, 0.01)) == await phase((0.02, 0.0, 0.05))


async def test_an_episode_that_leaves_is_no_longer_waited_for(
    engine: WatchedEngine, upstream: EmbeddedUpstream
) -> None:
    upstream.enter(0)
    upstream.enter(1)
    call = asyncio.create_task(upstream.generate(a_batch(1)[0]))
    await asyncio.sleep(0.05)
    assert engine.batches == []
    upstream.leave(1)
    upstream.leave(1)
    await call
    assert engine.batches == [[0]]


async def test_calls_without_an_entered_episode_are_gathered_into_one_batch(
    engine: WatchedEngine, upstream: EmbeddedUpstream
) -> None:
    await asyncio.gather(*(upstream.generate(r) for r in a_batch(5)))
    assert engine.batches == [[0, 1, 2, 3, 4]]


async def test_calls_that_come_while_a_batch_runs_make_the_next(
    engine: WatchedEngine, upstream: EmbeddedUpstream
) -> None:
    engine.go.clear()
    requests = a_batch(4)
    first = asyncio.create_task(upstream.generate(requests[0]))
    await until(lambda: engine.batches == [[0]])
    rest = [asyncio.create_task(upstream.generate(r)) for r in requests[1:]]
    await asyncio.sleep(0.05)
    engine.go.set()
    await asyncio.gather(first, *rest)
    assert engine.batches == [[0], [1, 2, 3]]


async def test_cancelling_a_running_call_leaves_the_others_alone(
    engine: WatchedEngine, upstream: EmbeddedUpstream
) -> None:
    engine.go.clear()
    calls = [asyncio.create_task(upstream.generate(r)) for r in a_batch(3)]
    await until(lambda: len(engine.batches) == 1)
    calls[1].cancel()
    await asyncio.sleep(0)
    engine.go.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    alone = engine_of(engine.model_dir).generate(a_batch(3))
    assert_same([results[0], results[2]], [alone[0], alone[2]])  # type: ignore[list-item]
    assert engine.stats.decoded_tokens == 24  # none for the cancelled row


async def test_cancelling_a_waiting_call_takes_it_out_of_the_queue(
    engine: WatchedEngine, upstream: EmbeddedUpstream
) -> None:
    upstream.enter(0)
    upstream.enter(1)
    requests = a_batch(2)
    call = asyncio.create_task(upstream.generate(requests[0]))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    upstream.leave(0)
    await upstream.generate(requests[1])
    assert engine.batches == [[1]]


async def test_one_request_object_called_twice_is_two_calls(engine: WatchedEngine, upstream: EmbeddedUpstream) -> None:
    engine.go.clear()
    same = a_batch(1)[0]
    calls = [asyncio.create_task(upstream.generate(same)) for _ in range(2)]
    await until(lambda: engine.batches == [[0, 0]])
    calls[0].cancel()
    await asyncio.sleep(0)
    engine.go.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], GenerateResult) and results[1].finish_reason == "length"


async def test_an_engine_failure_ends_every_waiting_call_and_the_next_batch_works(
    engine: WatchedEngine, upstream: EmbeddedUpstream
) -> None:
    engine.failure = RuntimeError("out of memory")
    engine.go.clear()
    requests = a_batch(3)
    calls = [asyncio.create_task(upstream.generate(r)) for r in requests[:2]]
    await until(lambda: len(engine.batches) == 1)
    calls.append(asyncio.create_task(upstream.generate(requests[2])))
    await asyncio.sleep(0)
    engine.go.set()
    for call in calls:
        with pytest.raises(PolicyError, match="RuntimeError: out of memory"):
            await call
    engine.failure = None
    assert (await upstream.generate(requests[0])).finish_reason == "length"


async def test_a_malformed_call_fails_alone(engine: WatchedEngine, upstream: EmbeddedUpstream) -> None:
    good, bad = await asyncio.gather(
        upstream.generate(a_batch(1)[0]), upstream.generate(request("bad", ())), return_exceptions=True
    )
    assert isinstance(good, GenerateResult)
    assert isinstance(bad, PolicyError)


async def test_weights_and_releases_go_between_batches(engine: WatchedEngine, upstream: EmbeddedUpstream) -> None:
    engine.go.clear()
    call = asyncio.create_task(upstream.generate(request("s", ids(20, 1))))
    await until(lambda: len(engine.batches) == 1)
    renew = asyncio.create_task(upstream.set_weights({}, 3))
    await asyncio.sleep(0.02)
    engine.go.set()
    assert (await call).policy_version == 0
    await renew
    assert engine.cached_tokens == 0
    assert (await upstream.generate(request("s", ids(20, 1)))).policy_version == 3
    await upstream.release("s")
    assert engine.cached_tokens == 0


async def test_closing_ends_the_calls_and_the_thread(engine: WatchedEngine) -> None:
    upstream = EmbeddedUpstream(engine)
    engine.go.clear()
    running = asyncio.create_task(upstream.generate(a_batch(1)[0]))
    await until(lambda: len(engine.batches) == 1)
    waiting = asyncio.create_task(upstream.generate(a_batch(2)[1]))
    await asyncio.sleep(0)
    closing = asyncio.create_task(upstream.aclose())
    await asyncio.sleep(0.01)
    engine.go.set()
    await closing
    for call in (running, waiting):
        with pytest.raises(PolicyError, match="closed"):
            await call
    with pytest.raises(PolicyError, match="closed"):
        await upstream.generate(a_batch(1)[0])
    assert not any(thread.name.startswith("termrl-engine") for thread in threading.enumerate())
    await upstream.aclose()
