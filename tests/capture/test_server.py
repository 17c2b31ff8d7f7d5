"""The session server's HTTP: errors, cancellation, streaming, limits and what it records."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import socket
from typing import Any

import aiohttp
import orjson
import pytest
from tokenizers import Tokenizer

from termrl.capture.render import ChatMLRenderer
from termrl.capture.server import raise_open_file_limit, serve
from termrl.capture.upstreams import GenerateResult, preflight
from termrl.errors import CaptureError
from tests.capture.fakes import Client, FakeUpstream, running, user

BAD_RESULTS: dict[str, Any] = {
    "no ids": GenerateResult(None, (-0.1,), "stop", 0),  # pyright: ignore[reportArgumentType]
    "no logprobs": GenerateResult((5, 2), None, "stop", 0),  # pyright: ignore[reportArgumentType]
    "stripped ids": GenerateResult((), (), "stop", 0),
    "fewer logprobs": GenerateResult((5, 2), (-0.1,), "stop", 0),
    "a null logprob": GenerateResult((5, 2), (-0.1, None), "stop", 0),  # pyright: ignore[reportArgumentType]
    "nan": GenerateResult((5, 2), (-0.1, float("nan")), "stop", 0),
    "a probability": GenerateResult((5, 2), (-0.1, 0.9), "stop", 0),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
async def test_a_result_that_cannot_be_trained_on_is_a_502_with_the_reason(
    client: Client, upstream: FakeUpstream, name: str
) -> None:
    session_id = await client.create()
    upstream.replies = [BAD_RESULTS[name]]
    status, body = await client.post(session_id, [user("one")])
    assert status == 502
    assert body["error"]["code"] == "capture_error"
    assert "the engine returned" in body["error"]["message"]
    assert client.server.counters(session_id).turns == 0


@pytest.mark.parametrize("name", BAD_RESULTS)
async def test_the_preflight_finds_an_engine_that_cannot_be_trained_on(upstream: FakeUpstream, name: str) -> None:
    upstream.replies = [BAD_RESULTS[name]]
    with pytest.raises(CaptureError, match="the engine returned"):
        await preflight(upstream, (3, 4))
    await preflight(upstream, (3, 4))
    assert upstream.released == ["preflight", "preflight"]


async def test_the_preflight_finds_logprobs_that_ignore_the_temperature(upstream: FakeUpstream) -> None:
    raw = GenerateResult((5, 6, 2), (-0.9, -1.2, -0.4), "stop", 0)
    upstream.replies = [raw, raw]
    with pytest.raises(CaptureError, match="temperature"):
        await preflight(upstream, (3, 4))


async def test_a_crash_of_the_engine_is_a_502_and_not_a_dead_server(client: Client, upstream: FakeUpstream) -> None:
    session_id = await client.create()
    upstream.replies = [RuntimeError("shapes do not match")]
    status, body = await client.post(session_id, [user("one")])
    assert (status, body["error"]["code"]) == (502, "engine_error")
    await client.chat(session_id, [user("one")])


async def test_date_and_server_headers_come_once_and_no_hop_by_hop_header_is_set(client: Client) -> None:
    session_id = await client.create()
    url = f"{client.server.url}/sessions/{session_id}/v1/chat/completions"
    async with client.http.post(url, json={"messages": [user("one")]}) as response:
        await response.read()
        assert len(response.headers.getall("date")) == 1
        assert len(response.headers.getall("server")) == 1
        for name in ("connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"):
            assert name not in response.headers
        assert float(response.headers["x-termrl-service-s"]) == 0.25
        assert float(response.headers["x-termrl-queue-s"]) == 0.5


async def test_delete_in_mid_generation_lets_the_chat_end_and_forgets_the_session(
    client: Client, upstream: FakeUpstream
) -> None:
    upstream.gate = asyncio.Event()
    session_id = await client.create()
    chat = asyncio.create_task(client.post(session_id, [user("one")]))
    await upstream.arrived.wait()
    assert await client.delete(session_id) == 204
    assert await client.delete(session_id) == 404
    assert (await client.get(session_id))[0] == 404
    assert upstream.released == []
    upstream.gate.set()
    status, body = await chat
    assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
    await client.server.settle()
    status, body = await client.post(session_id, [user("one")])
    assert (status, body["error"]["code"]) == (404, "session_not_found")
    assert upstream.released == [session_id]


async def test_a_client_that_disconnects_cancels_the_generation_and_leaves_the_ledger_unchanged(
    client: Client, upstream: FakeUpstream
) -> None:
    session_id = await client.create()
    first = await client.chat(session_id, [user("one")])
    before = client.server.segments(session_id)
    upstream.gate = asyncio.Event()
    upstream.arrived.clear()
    chat = asyncio.create_task(client.post(session_id, [user("one"), first, user("two")]))
    await upstream.arrived.wait()
    chat.cancel()
    await asyncio.wait_for(upstream.was_cancelled.wait(), 5)
    assert client.server.segments(session_id) == before
    assert client.server.counters(session_id).rollbacks == 0
    upstream.gate.set()
    again = await client.chat(session_id, [user("one")], seed=4)
    counters = client.server.counters(session_id)
    assert (counters.turns, counters.rollbacks) == (1, 1)
    await client.chat(session_id, [user("one"), again, user("two")])
    assert client.server.counters(session_id).turns == 2


async def test_a_socket_that_is_reset_in_mid_generation_cancels_it_too(client: Client, upstream: FakeUpstream) -> None:
    session_id = await client.create()
    upstream.gate = asyncio.Event()
    body = orjson.dumps({"messages": [user("one")]})
    host, port = client.server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /sessions/{session_id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await upstream.arrived.wait()
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
    await asyncio.wait_for(upstream.was_cancelled.wait(), 5)
    assert client.server.segments(session_id) == ()


async def test_max_tokens_beyond_the_window_is_clamped(client: Client, upstream: FakeUpstream) -> None:
    session_id = await client.create()
    _, body = await client.post(session_id, [user("one")], max_tokens=1_000_000)
    prompt = upstream.calls[0].prompt_ids
    assert upstream.calls[0].sampling.max_tokens == upstream.context_window - len(prompt)
    assert body["usage"]["prompt_tokens"] == len(prompt)
    await client.post(session_id, [user("two")])
    prompt = upstream.calls[1].prompt_ids
    assert upstream.calls[1].sampling.max_tokens == upstream.context_window - len(prompt)


async def test_a_full_window_finishes_with_context_and_samples_nothing(client: Client, upstream: FakeUpstream) -> None:
    session_id = await client.create()
    upstream.context_window = 30
    status, body = await client.post(session_id, [user("long " * 100)], max_tokens=10)
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "context"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert upstream.calls == []
    counters = client.server.counters(session_id)
    assert (counters.turns, counters.context_stops) == (0, 1)


async def test_a_stream_is_valid_server_sent_events_with_the_same_record(
    client: Client, upstream: FakeUpstream
) -> None:
    plain, streamed = await client.create(), await client.create()
    _, reply = await client.post(plain, [user("one")], seed=1)
    url = f"{client.server.url}/sessions/{streamed}/v1/chat/completions"
    call = {"messages": [user("one")], "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    async with client.http.post(url, json=call) as response:
        assert response.content_type == "text/event-stream"
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == reply["choices"][0]["message"]
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[2]["usage"] == reply["usage"]
    one, two = client.server.segments(plain)[0], client.server.segments(streamed)[0]
    assert dataclasses.replace(two, session_id=plain) == one


async def test_sampling_parameters_are_recorded_and_the_session_sets_what_a_call_leaves_out(
    client: Client, upstream: FakeUpstream
) -> None:
    session_id = await client.create(order=17, sampling={"temperature": 0.7, "max_tokens": 9, "stop_at_fence": True})
    first = await client.chat(session_id, [user("one")])
    await client.chat(session_id, [user("one"), first, user("two")], temperature=0.7, max_completion_tokens=5, seed=8)
    one, two = (call.sampling for call in upstream.calls)
    assert (one.temperature, one.max_tokens, one.stop_at_fence, one.seed) == (0.7, 9, True, None)
    assert (two.temperature, two.max_tokens, two.stop_at_fence, two.seed) == (0.7, 5, True, 8)
    assert one.stop_token_ids == (2, 0)
    assert {call.order for call in upstream.calls} == {17}
    _, record = await client.get(session_id)
    assert [turn["sampling"]["seed"] for turn in record["turns"]] == [None, 8]
    assert record["segments"][0]["temperature"] == 0.7
    assert record["counters"]["turns"] == 2


async def test_turns_whose_logprobs_are_not_of_a_plain_softmax_are_masked_and_counted(client: Client) -> None:
    for body in ({"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}):
        session_id = await client.create()
        reply = await client.chat(session_id, [user("one")], **body)
        counters = client.server.counters(session_id)
        assert counters.tokens_masked == counters.tokens_captured > 0
        (segment,) = client.server.segments(session_id)
        assert segment.sampled == 0
        await client.chat(session_id, [user("one"), reply, user("two")])
        (segment,) = client.server.segments(session_id)
        counters = client.server.counters(session_id)
        assert segment.sampled == counters.tokens_captured - counters.tokens_masked > 0


@pytest.mark.parametrize(
    "body", [{"n": 2}, {"presence_penalty": 1}, {"logit_bias": {"5": 1}}, {"min_p": 0.1}, {"stop": ["\n"]}]
)
async def test_options_that_would_falsify_the_logprobs_or_the_tokens_are_refused(
    client: Client, upstream: FakeUpstream, body: dict[str, Any]
) -> None:
    session_id = await client.create()
    status, reply = await client.post(session_id, [user("one")], **body)
    assert status == 400
    assert next(iter(body)) in reply["error"]["message"]
    assert upstream.calls == []


async def test_a_stop_string_that_is_a_control_token_is_matched_on_tokens(
    client: Client, upstream: FakeUpstream
) -> None:
    session_id = await client.create()
    await client.chat(session_id, [user("one")], stop=["<|im_start|>"])
    assert upstream.calls[0].sampling.stop_token_ids == (2, 0, 1)


async def test_weights_that_change_in_mid_episode_are_visible_per_turn_and_per_token(
    client: Client, upstream: FakeUpstream
) -> None:
    session_id = await client.create()
    messages = [user("one")]
    _, body = await client.post(session_id, messages)
    assert body["termrl"]["policy_version"] == 3
    upstream.policy_version = 4
    await client.chat(session_id, [*messages, body["choices"][0]["message"], user("two")])
    (segment,) = client.server.segments(session_id)
    sampled = [v for v, mask in zip(segment.policy_versions, segment.loss_mask, strict=True) if mask]
    assert sorted(set(sampled)) == [3, 4]
    assert sampled == sorted(sampled)
    others = {v for v, mask in zip(segment.policy_versions, segment.loss_mask, strict=True) if not mask}
    assert others == {-1}
    _, record = await client.get(session_id)
    assert [turn["policy_version"] for turn in record["turns"]] == [3, 4]


async def test_empty_and_one_token_turns_are_legal(client: Client, upstream: FakeUpstream) -> None:
    session_id = await client.create()
    assert client.server.segments(session_id) == ()
    upstream.replies = [GenerateResult((), (), "abort", 0), GenerateResult((2,), (-0.5,), "stop", 0)]
    empty = await client.chat(session_id, [user("one")])
    assert empty["content"] == ""
    await client.chat(session_id, [user("one"), empty, user("two")])
    (segment,) = client.server.segments(session_id)
    assert (segment.sampled, segment.turns) == (1, 2)


async def test_bad_requests_get_openai_shaped_errors_that_name_what_is_wrong(client: Client) -> None:
    session_id = await client.create()
    chat = f"/sessions/{session_id}/v1/chat/completions"
    cases: list[tuple[str, str, bytes, int, str]] = [
        ("POST", chat, b"{", 400, "not JSON"),
        ("POST", chat, b"{}", 400, "messages"),
        ("POST", chat, b'{"messages": []}', 400, "messages"),
        ("POST", chat, b'{"messages": [{"role": "alien", "content": ""}]}', 400, "messages.0.role"),
        ("POST", chat, b'{"messages": [{"role": "assistant", "content": ""}]}', 400, "last message"),
        ("POST", chat, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "text parts"),
        ("POST", chat, b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', 400, "temperature"),
        ("POST", chat, b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"a": 1}]}', 400, "tools"),
        ("POST", "/sessions", b'{"sampling": {"temprature": 1}}', 400, "temprature"),
        ("GET", "/nowhere", b"", 404, "no such route"),
        ("PUT", "/sessions", b"", 405, "PUT"),
    ]
    for method, path, body, expected, named in cases:
        async with client.http.request(method, client.server.url + path, data=body) as response:
            reply = await response.json()
            assert (response.status, set(reply["error"])) == (expected, {"message", "type", "code", "param"}), path
            assert named in reply["error"]["message"]
            assert response.headers["x-should-retry"] == "false"


async def test_a_body_or_a_number_of_sessions_beyond_the_bound_is_refused(
    upstream: FakeUpstream, renderer: ChatMLRenderer
) -> None:
    async with running(upstream, renderer, max_sessions=1, max_body_bytes=1000) as client:
        session_id = await client.create()
        assert (await client.post(session_id, [user("x" * 1000)]))[0] == 413
        async with client.http.post(f"{client.server.url}/sessions") as response:
            assert response.status == 503
        await client.delete(session_id)
        await client.create()


async def test_an_engine_that_never_answers_is_a_504(upstream: FakeUpstream, renderer: ChatMLRenderer) -> None:
    upstream.gate = asyncio.Event()
    async with running(upstream, renderer, timeout_s=0.05) as client:
        session_id = await client.create()
        status, body = await client.post(session_id, [user("one")])
        assert (status, body["error"]["code"]) == (504, "engine_timeout")
        assert len(upstream.cancelled) == 1


async def test_leaving_the_server_cancels_generations_and_forgets_sessions(
    upstream: FakeUpstream, renderer: ChatMLRenderer
) -> None:
    upstream.gate = asyncio.Event()
    async with aiohttp.ClientSession() as http:
        async with serve(upstream, renderer) as server:
            client = Client(server, http)
            session_id = await client.create()
            chat = asyncio.create_task(client.post(session_id, [user("one")]))
            await upstream.arrived.wait()
        status, body = await chat
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert len(upstream.cancelled) == 1
        assert upstream.released == [session_id]
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.create()
        async with serve(upstream, renderer) as server:
            assert (await Client(server, http).get(session_id))[0] == 404


async def test_health_and_models_tell_the_model_and_its_window(client: Client) -> None:
    async with client.http.get(f"{client.server.url}/health") as response:
        assert (await response.json())["status"] == "ok"
    async with client.http.get(f"{client.server.url}/v1/models") as response:
        (model,) = (await response.json())["data"]
        assert (model["id"], model["max_model_len"]) == ("fake", 4096)


async def test_the_openai_client_works_streamed_and_unstreamed(client: Client, upstream: FakeUpstream) -> None:
    from openai import AsyncOpenAI, DefaultAioHttpClient

    session_id = await client.create()
    base = f"{client.server.url}/sessions/{session_id}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=2, http_client=DefaultAioHttpClient()) as api:
        upstream.finish = "fence"
        upstream.replies = ["```bash\nls\n```\n"]
        opening: list[Any] = [user("one")]
        reply = await api.chat.completions.create(model="m", messages=opening, logprobs=True)
        assert reply.choices[0].finish_reason == "fence"
        assert reply.choices[0].message.content == "```bash\nls\n```\n"
        upstream.finish = None
        echoed: Any = reply.choices[0].message.model_dump(exclude_none=True)
        stream = await api.chat.completions.create(model="m", messages=[*opening, echoed, user("two")], stream=True)  # pyright: ignore[reportCallIssue, reportArgumentType]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text
        counters = client.server.counters(session_id)
        assert (counters.turns, counters.branches, counters.re_rendered_turns) == (2, 0, 0)


async def test_a_failed_call_is_not_retried_by_the_openai_client(client: Client, upstream: FakeUpstream) -> None:
    from openai import APIStatusError, AsyncOpenAI, DefaultAioHttpClient

    base = f"{client.server.url}/sessions/{await client.create()}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=2, http_client=DefaultAioHttpClient()) as api:
        upstream.replies = [CaptureError("no logprobs")]
        opening: list[Any] = [user("one")]
        with pytest.raises(APIStatusError):
            await api.chat.completions.create(model="m", messages=opening)
        assert len(upstream.calls) == 1


async def test_two_hundred_sessions_at_once_are_all_captured(client: Client, tokenizer: Tokenizer) -> None:
    async def episode(index: int) -> int:
        session_id = await client.create(order=index)
        messages = [user(f"task {index}")]
        for turn in range(3):
            messages += [await client.chat(session_id, messages), user(f"output {turn}")]
        counters = client.server.counters(session_id)
        assert (counters.turns, counters.branches, counters.re_rendered_turns) == (3, 0, 0)
        return sum(segment.sampled for segment in client.server.segments(session_id)) - counters.tokens_captured

    assert await asyncio.gather(*(episode(index) for index in range(200))) == [0] * 200


def test_the_open_file_limit_is_raised_within_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert raise_open_file_limit(300) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        assert raise_open_file_limit(200) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
