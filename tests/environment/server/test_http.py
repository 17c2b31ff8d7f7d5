"""The HTTP endpoints beside the WebSocket: whatever is sent, an answer in JSON, and no sandbox left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.environment.server.served import Server, fetch, wait_until

_JSON = {"Content-Type": "application/json"}
_leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
_any = st.recursive(_leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))
_task = st.sampled_from(["one", "two", "../../etc", "/etc", "", "\0", "o" * 5000])
_reset = st.fixed_dictionaries(
    {}, optional={"seed": _any, "episode_id": _any, "task_id": _task | _any, "task_path": _any, "timeout_s": _any}
)
_action = st.fixed_dictionaries(
    {},
    optional={
        "action_type": st.sampled_from(["exec", "view", "kill", "evaluate", "close", "reboot"]) | _any,
        "command": _any,
        "session_id": _any,
        "wait_seconds": _any,
        "surprise": _any,
    },
)
_step = st.fixed_dictionaries({}, optional={"action": _action | _any, "timeout_s": _any, "request_id": _any})
_mcp = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | _any,
        "method": st.sampled_from(["tools/list", "tools/call", "openenv/session/create", "openenv/session/close"])
        | _any,
        "params": _any,
        "id": _any,
    },
)
_bodies = {"/reset": _reset, "/step": _step, "/mcp": _mcp}


def post(server: Server, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and JSON of one POST; fails the test if the answer is none."""
    status, text = fetch(server.url + path, data=body, headers={**server.headers, **(headers or _JSON)})
    return status, json.loads(text)


def left_nothing(server: Server) -> bool:
    return wait_until(server.is_empty)


@pytest.mark.parametrize("path", list(_bodies))
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b"\xff\xfe\x00", b"[" * 50_000, b"[]", b"null", b"5", b'"text"', b'{"a":' * 20_000],
    ids=["empty", "brace", "word", "binary", "deep list", "list", "null", "number", "string", "deep object"],
)
def test_a_body_that_is_no_request_gets_an_error_in_json(server: Server, path: str, body: bytes) -> None:
    status, answer = post(server, path, body)
    if path == "/mcp":
        assert "error" in answer or status >= 400
    elif not (path == "/reset" and body in (b"", b"null")):
        assert 400 <= status < 500, (status, answer)
    assert isinstance(answer, dict) and answer
    assert left_nothing(server)


@pytest.mark.parametrize("path", list(_bodies))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_no_body_breaks_the_server_or_leaves_a_sandbox(server: Server, path: str, data: st.DataObject) -> None:
    body = json.dumps(data.draw(_bodies[path] | _any)).encode()
    status, answer = post(server, path, body)
    assert status in {200, 400, 404, 422, 500, 503}, (status, body)
    assert isinstance(answer, dict) and answer, (status, body)
    assert status < 400 or path == "/mcp" or answer.get("code"), (status, answer, body)
    assert fetch(server.url + "/health")[0] == 200
    assert left_nothing(server), body


@pytest.mark.parametrize("path", list(_bodies))
def test_other_methods_and_media_types_are_refused(server: Server, path: str) -> None:
    status, _ = fetch(server.url + path, headers=server.headers)
    assert status in {404, 405}
    status, answer = post(server, path, b"<a/>", {"Content-Type": "text/xml"})
    assert status >= 400 or "error" in answer
    assert left_nothing(server)


def test_a_reset_over_http_ends_its_own_sandbox(server: Server) -> None:
    status, answer = post(server, "/reset", b'{"task_id": "one", "episode_id": "http"}')
    assert (status, answer["reward"], answer["done"]) == (200, 0.0, False)
    assert answer["observation"]["task_id"] == "one"
    assert left_nothing(server)


def test_a_task_that_is_not_there_is_a_coded_error_over_http(server: Server) -> None:
    status, answer = post(server, "/reset", b'{"task_id": "../../etc"}')
    assert (status, answer["code"]) == (500, "EXECUTION_ERROR")
    assert "/" not in answer["message"].replace("../../etc", "")
