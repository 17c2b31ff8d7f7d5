"""The SGLang upstream against a double of its HTTP interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from termrl.capture.sglang import SGLangUpstream
from termrl.capture.upstreams import GenerateRequest, SamplingParams
from termrl.errors import CaptureError, PolicyError

REQUEST = GenerateRequest("s", (1, 5, 6), SamplingParams(temperature=0.8, max_tokens=4, seed=2**40 + 1))


class FakeSGLang:
    """SGLang's ``/generate`` and ``/abort_request``, with the answer that a test sets."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.aborted: list[str] = []
        self.abort_came = asyncio.Event()
        self.arrived = asyncio.Event()
        self.hold: asyncio.Event | None = None
        self.status = 200
        self.meta: dict[str, Any] = {
            "finish_reason": {"type": "stop", "matched": 2},
            "output_token_logprobs": [[-0.25, 7, None], [-0.5, 2, None]],
            "completion_tokens": 2,
            "weight_version": "12",
            "e2e_latency": 0.75,
            "queue_time": 0.25,
        }

    async def generate(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.arrived.set()
        if self.hold is not None:
            await self.hold.wait()
        return web.json_response({"text": "x", "meta_info": self.meta}, status=self.status)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        self.abort_came.set()
        return web.Response()


@pytest.fixture
async def engine() -> AsyncIterator[tuple[FakeSGLang, SGLangUpstream]]:
    fake = FakeSGLang()
    app = web.Application()
    app.router.add_post("/generate", fake.generate)
    app.router.add_post("/abort_request", fake.abort)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # pyright: ignore[reportAttributeAccessIssue]
    upstream = SGLangUpstream(f"http://127.0.0.1:{port}/", model_name="m", context_window=100)
    yield fake, upstream
    await upstream.aclose()
    await runner.cleanup()


async def test_ids_and_logprobs_go_through_untouched(engine: tuple[FakeSGLang, SGLangUpstream]) -> None:
    fake, upstream = engine
    result = await upstream.generate(REQUEST)
    assert (result.token_ids, result.logprobs, result.finish_reason) == ((7, 2), (-0.25, -0.5), "stop")
    assert (result.policy_version, result.service_s, result.queue_s) == (12, 0.5, 0.25)
    (asked,) = fake.asked
    assert asked["input_ids"] == [1, 5, 6]
    assert asked["return_logprob"] is True
    assert asked["stream"] is False
    assert asked["sampling_params"]["temperature"] == 0.8
    assert asked["sampling_params"]["no_stop_trim"] is True
    assert 0 <= asked["sampling_params"]["sampling_seed"] < 2**31


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"output_token_logprobs": None}, "output_token_logprobs"),
        ({"output_token_logprobs": [[-0.1, None, None]]}, "malformed"),
        ({"completion_tokens": 3}, "3 tokens"),
        ({"finish_reason": {"type": "tired"}}, "tired"),
        ({"output_token_logprobs": [[-0.1, 7, None]] * 5, "completion_tokens": 5}, "4 were allowed"),
    ],
)
async def test_an_answer_without_whole_ids_and_logprobs_is_refused(
    engine: tuple[FakeSGLang, SGLangUpstream], change: dict[str, Any], named: str
) -> None:
    fake, upstream = engine
    fake.meta |= change
    with pytest.raises(CaptureError, match=named):
        await upstream.generate(REQUEST)


async def test_an_aborted_turn_keeps_what_was_sampled(engine: tuple[FakeSGLang, SGLangUpstream]) -> None:
    fake, upstream = engine
    fake.meta["finish_reason"] = {"type": "abort", "message": "weights"}
    result = await upstream.generate(REQUEST)
    assert (result.finish_reason, result.token_ids) == ("abort", (7, 2))


async def test_cancelling_the_call_aborts_the_request_in_the_engine(
    engine: tuple[FakeSGLang, SGLangUpstream],
) -> None:
    fake, upstream = engine
    fake.hold = asyncio.Event()
    call = asyncio.create_task(upstream.generate(REQUEST))
    await fake.arrived.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(fake.abort_came.wait(), 5)
    assert fake.aborted == [fake.asked[0]["rid"]]
    fake.hold.set()


async def test_an_error_reply_or_a_dead_server_is_an_engine_error(engine: tuple[FakeSGLang, SGLangUpstream]) -> None:
    fake, upstream = engine
    fake.status = 503
    with pytest.raises(PolicyError, match="503"):
        await upstream.generate(REQUEST)
    dead = SGLangUpstream("http://127.0.0.1:9", model_name="m", context_window=100)
    with pytest.raises(PolicyError, match=r"127\.0\.0\.1:9"):
        await dead.generate(REQUEST)
    await dead.aclose()


async def test_stopping_at_a_fence_is_refused_by_name(engine: tuple[FakeSGLang, SGLangUpstream]) -> None:
    with pytest.raises(CaptureError, match="fence"):
        await engine[1].generate(GenerateRequest("s", (1,), SamplingParams(stop_at_fence=True)))
