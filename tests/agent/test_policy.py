"""The chat client against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from termrl.agent.policy import ChatPolicy, chat_client, redacted
from termrl.errors import ConfigError, PolicyError

Answer = Callable[[Request, dict[str, Any]], Awaitable[Response]]
ASK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


class Endpoint:
    """A chat-completions endpoint that answers as told and keeps what it was sent."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.clients: set[tuple[str, int]] = set()

    async def __call__(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        self.headers.append(dict(request.headers))
        assert request.client is not None
        self.clients.add((request.client.host, request.client.port))
        return await self._answer(request, body)


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(answer)
    app = Starlette(routes=[Route("/{path:path}", endpoint.__call__, methods=["POST"])])
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", backlog=4096)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    endpoint.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    try:
        yield endpoint
    finally:
        server.should_exit = True
        server.force_exit = True
        await serving


def completion(message: Any, finish_reason: Any = "stop", **fields: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [{"message": message, "finish_reason": finish_reason}],
    } | (fields)


def always(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    async def answer(request: Request, sent: dict[str, Any]) -> Response:
        if isinstance(body, bytes):
            return Response(body, status, headers, "application/json")
        return JSONResponse(body, status, headers)

    return answer


async def ask(answer: Answer, **options: Any) -> Any:
    async with served(answer) as endpoint, chat_client(endpoint.url, timeout_s=5) as client:
        return await ChatPolicy(client, model="m", **options).chat(ASK, max_tokens=8, seed=3)


async def test_the_request_holds_what_was_asked_and_nothing_is_invented() -> None:
    async with (
        served(always(completion({"role": "assistant", "content": "ok"}))) as endpoint,
        chat_client(endpoint.url, "secret") as client,
    ):
        await ChatPolicy(client, model="m").chat(ASK, max_tokens=8, seed=None)
        full = ChatPolicy(client, model="m", temperature=0.8, top_p=1.0, extra_body={"stop_at_fence": True})
        await full.chat(ASK, max_tokens=8, seed=3)
        other = ChatPolicy(client, model="m", max_tokens_field="max_completion_tokens")
        await other.chat(ASK, max_tokens=8, seed=None)
        session = ChatPolicy(client, model="m", base_url=endpoint.url.removesuffix("/v1") + "/sessions/a1/v1")
        await session.chat(ASK, max_tokens=8, seed=None)
    assert endpoint.bodies[0] == {"model": "m", "messages": ASK, "max_tokens": 8}
    assert endpoint.bodies[1] == {
        "model": "m",
        "messages": ASK,
        "max_tokens": 8,
        "seed": 3,
        "temperature": 0.8,
        "top_p": 1.0,
        "stop_at_fence": True,
    }
    assert endpoint.bodies[2] == {"model": "m", "messages": ASK, "max_completion_tokens": 8}
    assert endpoint.paths == ["/v1/chat/completions"] * 3 + ["/sessions/a1/v1/chat/completions"]
    assert {headers["authorization"] for headers in endpoint.headers} == {"Bearer secret"}


async def test_the_message_is_kept_verbatim_but_for_nulls() -> None:
    message = {
        "role": "assistant",
        "content": "```bash\nls\n```",
        "reasoning_content": "hm",
        "refusal": None,
        "tool_calls": [{"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{ }"}}],
        "vendor": {"a": None, "b": [1]},
    }
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    reply = await ask(always(completion(message, "fence", usage=usage)))
    kept = {key: value for key, value in message.items() if key != "refusal"} | {"vendor": {"b": [1]}}
    assert reply.message == kept
    assert (reply.content, reply.finish_reason, reply.reasoning) == ("```bash\nls\n```", "fence", "hm")
    assert (reply.prompt_tokens, reply.completion_tokens) == (5, 7)


async def test_a_message_goes_back_to_the_endpoint_byte_for_byte() -> None:
    message = {"role": "assistant", "content": "é\n\t😀", "tool_calls": [{"id": "c", "index": 0, "x": {"y": 1.5}}]}
    async with (
        served(always(completion(message))) as endpoint,
        chat_client(endpoint.url) as client,
    ):
        policy = ChatPolicy(client, model="m")
        reply = await policy.chat(ASK, max_tokens=8, seed=None)
        await policy.chat([*ASK, reply.message], max_tokens=8, seed=None)
    assert json.dumps(endpoint.bodies[1]["messages"][1]) == json.dumps(message)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_kept_apart_from_content(field: str) -> None:
    reply = await ask(always(completion({"role": "assistant", "content": None, field: "hm"})))
    assert (reply.content, reply.reasoning, reply.message) == ("", "hm", {"role": "assistant", field: "hm"})


async def test_native_tool_calls_with_empty_content_are_a_reply() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    reply = await ask(always(completion(message, "tool_calls")))
    assert (reply.content, reply.message) == ("", {"role": "assistant", "tool_calls": calls})


async def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert (await ask(always(completion({"role": "assistant", "content": parts})))).content == "ab"


@pytest.mark.parametrize("finish", ["stop", "length", "fence", "abort", "context", "content_filter"])
async def test_finish_reasons_pass_as_they_are(finish: str) -> None:
    assert (await ask(always(completion({"role": "assistant", "content": ""}, finish)))).finish_reason == finish


FAILURES = {
    "null message": (completion(None), 200, "message is null"),
    "message of nulls": (completion({"role": None, "content": None}), 200, "message is null"),
    "no choices": ({"id": "x", "choices": []}, 200, "no choices"),
    "null choices": ({"id": "x", "choices": None}, 200, "no choices"),
    "an error with status 200": ({"error": {"message": "overloaded"}}, 200, "no choices: overloaded"),
    "no finish reason": (completion({"role": "assistant", "content": "x"}, None), 200, "no finish_reason"),
    "not JSON": (b"<html>", 200, "not JSON: '<html>'"),
    "not an object": (b"[]", 200, "not a JSON object"),
    "empty body": (b"", 200, "not JSON"),
    "bad gateway": ({"error": {"message": "upstream gave\n no logprobs"}}, 502, "HTTP 502: upstream gave no logprobs"),
    "rate limit": ({"detail": "slow down"}, 429, "HTTP 429: slow down"),
    "plain text": (b"nope", 500, "HTTP 500: nope"),
    "unauthorised": ({"error": {"message": "bad key"}}, 401, "HTTP 401: bad key"),
    "conflict": ({"error": {"message": "two at once"}}, 409, "HTTP 409: two at once"),
    "bad request": ({"error": {"message": "unknown model"}}, 400, "HTTP 400: unknown model"),
}


@pytest.mark.parametrize(("body", "status", "message"), FAILURES.values(), ids=FAILURES.keys())
async def test_every_failure_is_a_policy_error_in_one_line_and_is_not_retried(
    body: Any, status: int, message: str
) -> None:
    async with (
        served(always(body, status)) as endpoint,
        chat_client(endpoint.url) as client,
    ):
        with pytest.raises(PolicyError) as caught:
            await ChatPolicy(client, model="m").chat(ASK, max_tokens=8, seed=None)
        assert len(endpoint.bodies) == 1
    assert message in caught.value.message
    assert caught.value.message.startswith(endpoint.url)
    assert "\n" not in caught.value.message


OVERFLOWS = [
    {"error": {"message": "too long", "code": "context_length_exceeded"}},
    {"message": "This model's maximum context length is 512 tokens. However, you requested 600 tokens"},
    {"error": {"message": "The input (600 tokens) is longer than the model's context length (512 tokens)."}},
    {"error": {"message": "request (600 tokens) exceeds the available context size (512 tokens)"}},
]


@pytest.mark.parametrize("body", OVERFLOWS)
async def test_a_prompt_beyond_the_window_is_a_context_finish(body: dict[str, Any]) -> None:
    reply = await ask(always(body, 400))
    assert (reply.finish_reason, reply.content) == ("context", "")


@pytest.mark.parametrize(("granted", "finish"), [(8, "length"), (5, "context"), (None, "length")])
async def test_a_cut_where_the_server_clamped_to_the_window_is_the_contexts(granted: int | None, finish: str) -> None:
    body = completion({"role": "assistant", "content": "```bash"}, "length", termrl={"max_tokens": granted})
    assert (await ask(always(body))).finish_reason == finish


async def test_nobody_listening_is_a_policy_error() -> None:
    async with served(always({})) as endpoint:
        url = endpoint.url
    async with chat_client(url) as client:
        with pytest.raises(PolicyError, match=r"127\.0\.0\.1") as caught:
            await ChatPolicy(client, model="m").chat(ASK, max_tokens=8, seed=None)
    assert caught.value.hint == "is the endpoint up?"


async def test_silence_beyond_the_timeout_is_a_policy_error() -> None:
    async def answer(request: Request, body: dict[str, Any]) -> Response:
        await asyncio.sleep(30)
        return JSONResponse({})

    async with served(answer) as endpoint, chat_client(endpoint.url, timeout_s=0.3) as client:
        start = time.monotonic()
        with pytest.raises(PolicyError, match="no answer within"):
            await ChatPolicy(client, model="m").chat(ASK, max_tokens=8, seed=None)
        assert time.monotonic() - start < 5
        assert len(endpoint.bodies) == 1


async def test_a_connection_lost_in_mid_reply_is_a_policy_error() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with chat_client(url) as client:
            with pytest.raises(PolicyError):
                await ChatPolicy(client, model="m").chat(ASK, max_tokens=8, seed=None)


async def test_a_cancelled_call_is_cancelled_at_the_endpoint() -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        arrived.set()
        while not await request.is_disconnected():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        gone.set()
        return JSONResponse({})

    async with served(answer) as endpoint, chat_client(endpoint.url) as client:
        call = asyncio.create_task(ChatPolicy(client, model="m").chat(ASK, max_tokens=8, seed=None))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(gone.wait(), 5)


OK = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("headers", "fields", "service", "queue"),
    [
        ({"x-termrl-service-s": "0.01", "x-termrl-queue-s": "0.02"}, {}, 0.01, 0.02),
        ({}, {"termrl": {"service_s": 0.01, "queue_s": 0.5}}, 0.01, 0.5),
    ],
)
async def test_service_and_queue_are_what_the_server_tells(
    headers: dict[str, str], fields: dict[str, Any], service: float, queue: float
) -> None:
    async def answer(request: Request, body: dict[str, Any]) -> Response:
        await asyncio.sleep(0.05)
        return JSONResponse(completion(OK, **fields), headers=headers)

    reply = await ask(answer)
    assert (reply.service_s, reply.queue_s) == (service, queue)


@pytest.mark.parametrize("told", [None, "nan", "-1", "soon"])
async def test_all_the_time_is_service_when_the_server_does_not_tell(told: str | None) -> None:
    async def answer(request: Request, body: dict[str, Any]) -> Response:
        await asyncio.sleep(0.1)
        return JSONResponse(completion(OK), headers={"x-termrl-service-s": told} if told else None)

    reply = await ask(answer)
    assert 0.1 <= reply.service_s < 5
    assert reply.queue_s == 0.0


async def test_a_thousand_calls_at_once_all_arrive_together() -> None:
    waiting = 0
    everyone = asyncio.Event()

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        nonlocal waiting
        waiting += 1
        if waiting == 1000:
            everyone.set()
        await asyncio.wait_for(everyone.wait(), 50)
        return JSONResponse(completion({"role": "assistant", "content": body["messages"][0]["content"]}))

    async with served(answer) as endpoint, chat_client(endpoint.url) as client:
        policy = ChatPolicy(client, model="m")

        async def one(n: int) -> str:
            asked = [{"role": "user", "content": f"call {n}"}]
            return (await policy.chat(asked, max_tokens=8, seed=n)).content

        start = time.monotonic()
        contents = await asyncio.gather(*(one(n) for n in range(1000)))
        seconds = time.monotonic() - start
    assert contents == [f"call {n}" for n in range(1000)]
    assert len(endpoint.bodies) == len(endpoint.clients) == 1000
    assert seconds < 30


async def test_a_thousand_calls_at_once_cost_a_few_times_what_bare_http_costs() -> None:
    """openai-python#1596; in CPU seconds, the server's included, so that a busy machine makes no difference."""

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        await asyncio.sleep(0.3)
        return JSONResponse(completion(OK))

    async def cpu_s(call: Callable[[int], Awaitable[object]]) -> float:
        await call(0)
        start = time.process_time()
        for _ in range(2):  # on new connections, then on kept ones
            await asyncio.gather(*(call(n) for n in range(1000)))
        return time.process_time() - start

    async with served(answer) as endpoint, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def bare(n: int) -> object:
            async with http.post(f"{endpoint.url}/chat/completions", json={"messages": ASK, "seed": n}) as response:
                return await response.json()

        bare_s = await cpu_s(bare)
    async with served(answer) as endpoint, chat_client(endpoint.url) as client:
        policy = ChatPolicy(client, model="m")
        own_s = await cpu_s(lambda n: policy.chat(ASK, max_tokens=8, seed=n))
    assert own_s < 6 * bare_s, f"{own_s:.2f} s of CPU against {bare_s:.2f} s"


async def test_the_client_is_closed_when_its_block_fails() -> None:
    clients = []
    with pytest.raises(RuntimeError, match="stop"):
        async with chat_client("http://127.0.0.1:9/v1") as client:
            clients.append(client)
            raise RuntimeError("stop")
    assert clients[0].is_closed()


async def test_a_loopback_endpoint_is_not_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert (await ask(always(completion(OK)))).content == "x"


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "ftp://host/v1", "http:///v1", "http://me:pass@host/v1"])
async def test_a_bad_url_is_a_config_error_that_shows_no_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        async with chat_client(url):
            pass
    assert "pass" not in caught.value.problems[0].replace("password", "")


def test_urls_are_shown_without_secrets() -> None:
    assert redacted("https://me:pass@host:1/v1?key=abc#x") == "https://host:1/v1"
