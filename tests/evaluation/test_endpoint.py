"""What is sent to an endpoint, how often, and how much of it at once; over real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from termrl.agent.policy import retry_after
from termrl.agent.types import Policy, Reply
from termrl.errors import ConfigError, PolicyError
from termrl.evaluation.config import EvalConfig
from termrl.evaluation.endpoint import check_endpoint, open_endpoint
from termrl.evaluation.throttle import Throttle
from tests.evaluation.chat_server import MODEL, Answer, Call, ChatServer, chat_server

KEY = "sk-a-very-secret-key-99"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(lambda call: Answer("yes")) as running:
        yield running


def config(url: str, concurrency: int = 8, **policy: object) -> EvalConfig:
    settings = {"base_url": url, "model": MODEL, **policy}
    return EvalConfig.model_validate({"policy": settings, "concurrency": concurrency})


def ask(settings: EvalConfig, *, key: str | None = None, times: int = 1, fatal: Any = None) -> list[Any]:
    """Ask so many times at once, each in a session of its own; replies and errors."""

    async def one(sessions: Any, order: int) -> Reply:
        async with sessions.open(order, temperature=None) as session:
            policy: Policy = session.policy
            return await policy.chat(ASK, max_tokens=5, seed=7)

    async def run() -> list[Any]:
        stop = fatal if fatal is not None else lambda error: None
        async with open_endpoint(settings, key, fatal=stop, say=lambda line: None) as sessions:
            return await asyncio.gather(*(one(sessions, n) for n in range(times)), return_exceptions=True)

    return asyncio.run(run())


def first(answer: Answer, *, then: str = "yes", count: int = 1) -> Callable[[Call], Answer]:
    """So many calls get this answer, the others a reply."""
    return lambda call: answer if call.number < count else Answer(then)


def test_a_full_endpoint_is_asked_again_after_as_long_as_it_said(server: ChatServer) -> None:
    server.answer = first(Answer("slow down", status=429, headers={"Retry-After": "1"}))
    started = time.monotonic()
    (reply,) = ask(config(server.url))
    assert reply.content == "yes"
    assert time.monotonic() - started >= 1.0
    assert len(server.calls) == 2


def test_the_wait_for_a_full_endpoint_is_a_queue_and_not_the_models_time(server: ChatServer) -> None:
    server.answer = first(Answer("slow down", status=429, headers={"Retry-After": "0.7"}))
    (reply,) = ask(config(server.url))
    assert reply.queue_s >= 0.7
    assert reply.service_s < 0.5


def test_a_503_is_asked_again(server: ChatServer) -> None:
    server.answer = first(Answer("loading", status=503, headers={"Retry-After": "0.1"}))
    assert ask(config(server.url))[0].content == "yes"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(drop=True),
        Answer("oops", status=500),
        Answer("bad gateway", status=502),
        Answer("gateway timeout", status=504),
        Answer(body={"choices": []}),
        Answer(body={"choices": [{"message": None, "finish_reason": "stop"}]}),
    ],
    ids=["dropped", "500", "502", "504", "no choices", "null message"],
)
def test_what_may_have_been_sampled_is_never_asked_again(server: ChatServer, answer: Answer) -> None:
    server.answer = first(answer)
    (error,) = ask(config(server.url))
    assert isinstance(error, PolicyError)
    assert len(server.calls) == 1


def test_an_endpoint_that_is_not_there_yet_is_waited_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replies: list[Any] = []
    asking = threading.Thread(target=lambda: replies.extend(ask(config(f"http://127.0.0.1:{port}/v1"))))
    asking.start()
    time.sleep(0.5)
    with chat_server(lambda call: Answer("here"), port=port):
        asking.join(20)
    assert replies[0].content == "here"


def test_a_wait_beyond_what_is_allowed_is_an_error_that_says_so(server: ChatServer) -> None:
    server.answer = lambda call: Answer("quota", status=429, headers={"Retry-After": "3600"})
    started = time.monotonic()
    (error,) = ask(config(server.url, wait_s=2.0))
    assert isinstance(error, PolicyError)
    assert "HTTP 429: quota; asks for 3600 s, policy.wait_s is 2 s" in error.message
    assert time.monotonic() - started < 2.0


def test_the_number_of_calls_at_once_is_bounded(server: ChatServer) -> None:
    def slow(call: Call) -> Answer:
        time.sleep(0.03)
        return Answer("yes")

    server.answer = slow
    assert all(isinstance(reply, Reply) for reply in ask(config(server.url, 3), times=12))
    assert server.most_in_flight == 3


def test_an_endpoint_with_less_room_gets_all_calls_answered_by_fewer_at_once(server: ChatServer) -> None:
    room = threading.Semaphore(2)

    def crowded(call: Call) -> Answer:
        if not room.acquire(blocking=False):
            return Answer("too many", status=429, headers={"Retry-After": "0.05"})
        try:
            time.sleep(0.02)
            return Answer("yes")
        finally:
            room.release()

    server.answer = crowded
    replies = ask(config(server.url, 16), times=40)
    assert [reply.content for reply in replies] == ["yes"] * 40


def test_the_bound_is_halved_once_for_a_burst_and_grows_back() -> None:
    async def run() -> None:
        seen: list[int] = []
        throttle = Throttle(16, seen.append)
        began = time.monotonic()
        for _ in range(16):
            throttle.refused(began, retry_after_s=0.0, too_many=True)
        assert (throttle.limit, seen) == (8, [8])
        throttle.refused(time.monotonic(), retry_after_s=0.0, too_many=True)
        assert (throttle.limit, seen) == (4, [8, 4])
        throttle.refused(time.monotonic(), retry_after_s=0.0, too_many=False)
        assert throttle.limit == 4
        answers = 0
        while throttle.limit < 16:
            throttle.answered()
            answers += 1
        assert answers > sum(range(4, 16))
        for _ in range(100):
            throttle.answered()
        assert throttle.limit == 16

    asyncio.run(run())


def test_refusals_that_say_nothing_are_waited_out_longer_each_time() -> None:
    async def run() -> list[float]:
        throttle = Throttle(1)
        waits = []
        for _ in range(8):
            waits.append(throttle.refused(time.monotonic(), retry_after_s=None, too_many=True))
            throttle._resume_at = 0.0  # as if it had been waited for
        return waits

    assert asyncio.run(run()) == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_cancelled_waiter_leaves_its_place_to_others() -> None:
    async def run() -> None:
        throttle = Throttle(1)

        async def hold(seconds: float) -> None:
            async with throttle.slot():
                await asyncio.sleep(seconds)

        holder = asyncio.create_task(hold(0.1))
        waiters = [asyncio.create_task(hold(0)) for _ in range(3)]
        await asyncio.sleep(0.02)
        waiters[0].cancel()
        await asyncio.wait_for(asyncio.gather(holder, *waiters[1:]), 2)
        holder = asyncio.create_task(hold(10))
        await asyncio.sleep(0.02)
        holder.cancel()
        await asyncio.wait_for(hold(0), 2)
        throttle.refused(time.monotonic(), retry_after_s=0.1, too_many=False)
        paused = [asyncio.create_task(hold(0)) for _ in range(3)]
        await asyncio.sleep(0.02)
        paused[1].cancel()
        await asyncio.wait_for(asyncio.gather(paused[0], paused[2]), 2)

    asyncio.run(run())


def test_retry_after_is_read_as_seconds_or_as_a_date() -> None:
    assert retry_after("2.5") == 2.5
    later = retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True))
    assert later is not None and 25 < later <= 30
    assert retry_after(format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)) == 0.0
    for nonsense in (None, "", "soon", "-3", "nan"):
        assert retry_after(nonsense) is None


def test_the_key_goes_in_the_header_and_into_no_error(server: ChatServer) -> None:
    server.answer = lambda call: Answer(f"bad key {KEY}", status=500)
    (error,) = ask(config(server.url), key=KEY)
    assert server.calls[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in str(error)
    assert "bad key ***" in str(error)


def test_a_redirect_takes_no_call_and_no_key_elsewhere(server: ChatServer) -> None:
    with chat_server(lambda call: Answer("stolen")) as other:
        server.answer = lambda call: Answer("moved", status=307, headers={"Location": f"{other.url}/chat/completions"})
        (error,) = ask(config(server.url), key=KEY)
        assert isinstance(error, PolicyError)
        assert "HTTP 307" in error.message
        assert other.calls == []


def test_nothing_of_openais_variables_reaches_another_endpoint(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, KEY)
    ask(config(server.url))
    assert KEY not in str(server.calls[0].headers)


def test_the_request_is_as_the_settings_say(server: ChatServer) -> None:
    ask(config(server.url))
    assert server.calls[0].body == {"model": MODEL, "max_tokens": 5, "messages": ASK, "seed": 7}
    settings = config(
        server.url,
        send_seed=False,
        max_tokens_field="max_completion_tokens",
        extra_body={"reasoning": {"effort": "low"}},
    )
    ask(settings)
    body = {"model": MODEL, "max_completion_tokens": 5, "messages": ASK, "reasoning": {"effort": "low"}}
    assert server.calls[1].body == body


@pytest.mark.parametrize(("status", "ends"), [(401, True), (403, True), (404, True), (400, False), (500, False)])
def test_a_refusal_that_no_later_call_can_escape_ends_the_evaluation(
    server: ChatServer, status: int, ends: bool
) -> None:
    server.answer = lambda call: Answer("no", status=status)
    told: list[PolicyError] = []
    ask(config(server.url), fatal=told.append)
    assert bool(told) == ends


def test_after_an_answer_a_403_is_about_one_call(server: ChatServer) -> None:
    server.answer = lambda call: Answer("yes") if call.number == 0 else Answer("filtered", status=403)
    told: list[PolicyError] = []
    replies = ask(config(server.url, 1), times=3, fatal=told.append)
    assert [type(reply) for reply in replies] == [Reply, PolicyError, PolicyError]
    assert told == []


def test_a_prompt_that_is_too_long_from_the_start_ends_the_evaluation_and_scores_nothing(server: ChatServer) -> None:
    too_long = Answer("This model's maximum context length is 4096 tokens", status=400)
    server.answer = lambda call: too_long
    told: list[PolicyError] = []
    ask(config(server.url), fatal=told.append)
    assert "refuses the first prompt" in told[0].message
    server.calls, told = [], []
    server.answer = lambda call: Answer("yes") if call.number == 0 else too_long
    assert [reply.finish_reason for reply in ask(config(server.url, 1), times=2, fatal=told.append)] == [
        "stop",
        "context",
    ]
    assert told == []


def test_the_preflight_says_what_is_wrong(server: ChatServer) -> None:
    said: list[str] = []
    asyncio.run(check_endpoint(config(server.url), None, said.append))
    assert said == []
    asyncio.run(check_endpoint(config(server.url, model="other"), None, said.append))
    assert "does not list a model other; it has scripted" in said[0]
    server.models = Answer("who are you", status=401)
    with pytest.raises(ConfigError, match="the key is refused or missing"):
        asyncio.run(check_endpoint(config(server.url), None, said.append))
    server.models = Answer("no such route", status=404)
    asyncio.run(check_endpoint(config(server.url), None, said.append))
    assert len(said) == 1


def test_the_preflight_refuses_an_endpoint_where_nobody_is() -> None:
    with pytest.raises(PolicyError) as error:
        asyncio.run(check_endpoint(config("http://127.0.0.1:9/v1"), None, lambda line: None))
    assert "is the endpoint up?" in (error.value.hint or "")
