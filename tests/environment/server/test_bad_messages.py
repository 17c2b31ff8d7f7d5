"""Whatever a client sends, it gets a coded error, keeps its session, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from tests.environment.server.served import Server, Wire, wire

CODES = {"INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR"}
ANSWERS = {"observation", "state", "mcp", "error"}

_leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
_json = st.recursive(_leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner))
_key = st.sampled_from(
    [
        "action_type",
        "command",
        "session_id",
        "block",
        "wait_seconds",
        "file_path",
        "content",
        "metadata",
        "type",
        "self",
    ]
) | st.text(max_size=8)
_data = st.dictionaries(_key, _json | st.sampled_from(["exec", "view", "kill", "evaluate", "../x", "\0"]), max_size=5)
_type = st.sampled_from(["reset", "step", "state", "mcp", "RESET", ""]) | _json
_frame = st.fixed_dictionaries(
    {},
    optional={"type": _type, "data": _data | _json, "id": _json, "\ud800".encode("utf-8", "replace").decode(): _json},
)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("", "INVALID_JSON"),
        ("{", "INVALID_JSON"),
        ("nonsense", "INVALID_JSON"),
        (b"\x00\xff", "INVALID_JSON"),
        (b'{"type": "state"}', "INVALID_JSON"),
        ("NaN", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ('{"a":' * 50_000, "INVALID_JSON"),
        ('{"type": "reset", "data": {"seed": ' + "9" * 10_000 + "}}", "INVALID_JSON"),
        (r'{"type": "step", "data": {"command": "\ud800"}}', "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ("null", "VALIDATION_ERROR"),
        ("5", "VALIDATION_ERROR"),
        ('"reset"', "VALIDATION_ERROR"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type": "Reset"}', "UNKNOWN_TYPE"),
        ('{"type": ["reset"]}', "UNKNOWN_TYPE"),
        ('{"type": {"a": 1}}', "UNKNOWN_TYPE"),
        ('{"type": "step"}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": []}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"command": "true"}, "id": 4}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"comand": "true"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"command": 5}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"command": null}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"action_type": "reboot"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"action_type": ["exec"]}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"type": ["call_tool"]}}', "EXECUTION_ERROR"),
        ('{"type": "step", "data": {"wait_seconds": "soon"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": "x"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"task_id": ["one"]}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"episode_id": "' + "e" * 300 + '"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"self": 1}}', "EXECUTION_ERROR"),
        ('{"type": "reset", "data": 5}', "VALIDATION_ERROR"),
        ('{"type": "state", "data": {}}', "VALIDATION_ERROR"),
        ('{"type": "mcp"}', "VALIDATION_ERROR"),
    ],
)
async def test_a_bad_frame_gets_its_code_and_the_session_goes_on(server: Server, frame: str | bytes, code: str) -> None:
    async with wire(server) as client:
        await client.reset(episode_id="kept")
        answer = await client.say(frame)
        assert (answer["type"], answer["data"]["code"]) == ("error", code), answer
        assert answer["data"]["message"]
        if "reset" not in str(frame):
            assert await client.output("echo here") == "here\n"
        assert (await client.ask("state"))["type"] == "state"


def test_no_frame_ends_the_session_or_goes_unanswered(server: Server) -> None:
    """One connection for all of them: a frame that broke it would fail every later one."""
    loop = asyncio.new_event_loop()
    context = wire(server)
    client = loop.run_until_complete(context.__aenter__())

    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(frame=(_frame | _json).map(json.dumps) | st.text(max_size=60) | st.binary(max_size=60))
    def check(frame: str | bytes) -> None:
        try:
            frame.encode() if isinstance(frame, str) else frame
        except UnicodeEncodeError:
            return  # no client can send that
        if isinstance(frame, str) and _means(frame) == "close":
            return
        answer = loop.run_until_complete(asyncio.wait_for(client.say(frame), 30))
        assert answer["type"] in ANSWERS
        assert answer["type"] != "error" or answer["data"]["code"] in CODES

    try:
        check()
        assert loop.run_until_complete(client.reset())["reward"] == 0.0
        loop.run_until_complete(context.__aexit__(None, None, None))
    finally:
        loop.close()


def _means(frame: str) -> Any:
    try:
        value = json.loads(frame)
    except ValueError:
        return None
    return value.get("type") if isinstance(value, dict) else None


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "x" * 3_000_000},
        {"type": "step", "x": "y" * 3_000_000},
        {"type": "step", "data": {"action_type": "y" * 3_000_000}},
        {"type": "step", "data": {"y" * 3_000_000: 1}},
        {"type": "step", "data": {str(number): number for number in range(50_000)}},
        {"type": "reset", "data": {"task_id": "y" * 3_000_000}},
    ],
)
async def test_an_error_is_short_however_long_the_message_was(server: Server, frame: dict[str, Any]) -> None:
    async with wire(server) as client:
        await client.socket.send(json.dumps(frame))
        answer = await client.socket.recv()
        assert len(answer) < 20_000 and json.loads(answer)["data"]["code"] in CODES


async def test_odd_text_goes_through_unharmed(server: Server) -> None:
    async with wire(server) as client:
        await client.reset("one", episode_id="é\u2028😀\0")
        assert (await client.ask("state"))["data"]["episode_id"] == "é\u2028😀\0"
        text = "é 😀 \u2028 \ufeff \\ \" ' $HOME `x`"
        await client.step(action_type="write_file", file_path="té😀 x", content=text)
        assert await client.output("cat 'té😀 x'") == text
        assert await client.output(r"printf '\xff\xfe ok'") == "\ufffd\ufffd ok"
        refused = await client.step(command="echo \0")
        assert refused["observation"]["success"] is False and "NUL" in refused["observation"]["error"]


async def test_a_message_over_the_bound_is_an_error_and_one_far_over_it_ends_only_its_own_session(
    server: Server,
) -> None:
    async with wire(server) as bystander, wire(server) as client:
        await bystander.reset()
        await client.reset()
        most = 16 << 20
        big = await client.step(action_type="write_file", file_path="big", content="x" * (most - 1000))
        assert big["observation"]["success"] is True
        answer = await client.ask("step", {"action_type": "write_file", "file_path": "big", "content": "x" * most})
        assert answer["data"]["code"] == "VALIDATION_ERROR"
        assert await client.output("stat -c %s big") == f"{most - 1000}\n"
        with pytest.raises(ConnectionClosed) as closed:
            await client.ask("step", {"command": "x" * (most * 4 + 1)})
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        assert await bystander.output("echo here") == "here\n"


async def test_messages_sent_ahead_are_answered_in_order_and_bounded(server: Server) -> None:
    async with wire(server) as client:
        await client.reset()
        for number in range(20):
            await client.socket.send(json.dumps({"type": "step", "data": {"command": f"echo {number}"}}))
        outputs = [json.loads(await client.socket.recv())["data"]["observation"]["output"] for _ in range(20)]
        assert outputs == [f"{number}\n" for number in range(20)]
        with pytest.raises(ConnectionClosed) as closed:
            await _flood(client)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008


async def _flood(client: Wire) -> None:
    await client.socket.send('{"type": "step", "data": {"command": "sleep 30"}}')
    for _ in range(200):
        await client.socket.send('{"type": "state"}')
    await client.socket.recv()
