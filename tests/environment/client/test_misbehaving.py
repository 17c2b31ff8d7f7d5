"""Servers and networks that do what they should not: what the client makes of each."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.frames import Opcode

from termrl.environment.client import ClientOptions, EnvClient
from termrl.environment.protocol import Action
from termrl.errors import CapacityError, DeadlineError, EnvironmentLostError, ProtocolError, ServerError
from tests.environment.client.conftest import answering, error, misbehaving, observation, polite

LS = Action(command="ls")


async def test_an_answer_that_comes_too_late_is_never_taken_for_the_next_one() -> None:
    said: list[str] = []

    async def slow_once(message: dict[str, Any]) -> str | None:
        if message["type"] == "step" and message["data"]["command"] == "slow":
            await asyncio.sleep(0.3)
        said.append(message["type"])
        return await polite(message)

    async with misbehaving(lambda c: answering(c, slow_once)) as url:
        async with EnvClient(url) as client:
            await client.reset("t")
            with pytest.raises(DeadlineError):
                await client.step(Action(command="slow"), deadline_s=0.1)
            for _ in range(2):
                with pytest.raises(EnvironmentLostError):
                    await client.step(LS)
                await asyncio.sleep(0.25)
        assert said.count("reset") == 1, "and no session is opened behind the caller's back"


async def test_two_answers_to_one_question_end_the_connection() -> None:
    async def twice(connection: ServerConnection) -> None:
        async for frame in connection:
            answer = await polite(json.loads(frame)) or ""
            await connection.send(answer)
            if json.loads(frame)["type"] == "step":
                await connection.send(answer)

    async with misbehaving(twice) as url, EnvClient(url) as client:
        await client.reset("t")
        await client.step(LS)
        await asyncio.sleep(0.05)
        with pytest.raises(ProtocolError, match="nobody asked for"):
            await client.step(LS)


async def test_the_answer_to_another_action_is_not_taken() -> None:
    async def mixed(message: dict[str, Any]) -> str | None:
        return observation(action_type="exec") if message["type"] == "step" else await polite(message)

    async with misbehaving(lambda c: answering(c, mixed)) as url, EnvClient(url) as client:
        await client.reset("t")
        with pytest.raises(ProtocolError, match="'evaluate' is one to 'exec'"):
            await client.step(Action(action_type="evaluate"))


GARBAGE = {
    "not JSON": "{",
    "an array": "[]",
    "no type": '{"data": {}}',
    "no data": '{"type": "observation"}',
    "data that is none": '{"type": "observation", "data": 1}',
    "another type": '{"type": "state", "data": {}}',
    "binary": b"\x00\x01",
    "no observation": '{"type": "observation", "data": {"reward": 1.0, "done": true}}',
    "a reward in words": observation(action_type="exec", reward="1"),
    "a reward that is no number": '{"type":"observation","data":{"observation":{},"reward":NaN,"done":false}}',
    "done in words": observation(action_type="exec", done="yes"),
    "an output that is no text": observation(action_type="exec", output=5),
    "nested without end": "[" * 100_000,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_a_protocol_error_and_the_end_of_the_connection(garbage: str | bytes) -> None:
    async def answer(connection: ServerConnection) -> None:
        async for frame in connection:
            message = json.loads(frame)
            await connection.send(garbage if message["type"] == "step" else await polite(message) or "")

    async with misbehaving(answer) as url, EnvClient(url) as client:
        await client.reset("t")
        with pytest.raises(ProtocolError):
            await client.step(LS)
        with pytest.raises(EnvironmentLostError):
            await client.step(LS)


@pytest.mark.parametrize("how", ["close", "abort", "half a frame", "a text that is none"])
async def test_a_connection_that_ends_in_mid_step_is_lost(how: str) -> None:
    async def die(connection: ServerConnection) -> None:
        async for frame in connection:
            message = json.loads(frame)
            if message["type"] == "reset":
                await connection.send(await polite(message) or "")
                continue
            if how == "close":
                await connection.close(1011, "out of memory")
                return
            if how == "half a frame":
                connection.transport.write(b'\x81\x7e\x10\x00{"type": "obser')
                await asyncio.sleep(0.05)
            if how == "a text that is none":
                connection.transport.write(b"\x81\x02\xff\xfe")
                await asyncio.sleep(0.05)
            connection.transport.abort()
            return

    async with misbehaving(die) as url, EnvClient(url) as client:
        await client.reset("t")
        with pytest.raises(EnvironmentLostError, match="out of memory" if how == "close" else "closed the connection"):
            await client.step(LS)
        with pytest.raises(EnvironmentLostError):
            await client.state()


async def test_a_server_that_is_started_anew_gets_no_session_that_was_not_reset() -> None:
    seen: list[str] = []

    async def noting(message: dict[str, Any]) -> str | None:
        seen.append(message["type"])
        return await polite(message)

    async with misbehaving(lambda c: answering(c, noting)) as url:
        client = EnvClient(url)
        await client.connect()
        await client.reset("t")
    port = int(url.rpartition(":")[2])
    async with serve(lambda c: answering(c, noting), "127.0.0.1", port):
        for _ in range(3):
            with pytest.raises(EnvironmentLostError):
                await client.step(LS)
    await client.close()
    assert seen in (["reset"], ["reset", "close"])


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR"])
async def test_a_session_that_cannot_be_made_is_said_so_with_its_code(code: str) -> None:
    async def refuse(connection: ServerConnection) -> None:
        await connection.send(error(code, "no docker"))
        await connection.close(1000)

    async with misbehaving(refuse) as url:
        for pause_s in (0.0, 0.1):
            async with EnvClient(url) as client:
                await asyncio.sleep(pause_s)
                with pytest.raises(ServerError, match="no docker") as caught:
                    await client.reset("t")
                assert caught.value.code == code


async def test_capacity_is_asked_for_again_with_growing_uneven_pauses() -> None:
    times: list[float] = []

    async def full_for_a_while(connection: ServerConnection) -> None:
        times.append(time.monotonic())
        if len(times) < 5:
            await connection.send(error("CAPACITY_REACHED", active_sessions=8, max_sessions=8))
            await connection.close(1000)
        else:
            await answering(connection, polite)

    async with misbehaving(full_for_a_while) as url, EnvClient(url, ClientOptions(capacity_wait_s=30)) as client:
        assert (await client.reset("t")).instruction == "Do it."
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(pauses) == 4 and pauses[-1] > pauses[0] and max(pauses) < 2


async def test_a_busy_proxy_counts_as_a_server_without_a_slot() -> None:
    asked = 0

    def busy_once(connection: ServerConnection, request: Any) -> Any:
        nonlocal asked
        asked += 1
        return connection.respond(503, "busy") if asked == 1 else None

    async with misbehaving(lambda c: answering(c, polite), process_request=busy_once) as url:
        async with EnvClient(url) as client:
            with pytest.raises(CapacityError, match="503"):
                await client.reset("t")
        asked = 0
        async with EnvClient(url, ClientOptions(capacity_wait_s=10)) as client:
            await client.reset("t")


async def test_capacity_in_mid_session_is_no_reason_to_connect_again() -> None:
    connections = 0

    async def script(connection: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        await connection.recv()
        await connection.send(observation(action_type="reset"))
        await connection.recv()
        await connection.send(error("CAPACITY_REACHED"))

    async with misbehaving(script) as url, EnvClient(url, ClientOptions(capacity_wait_s=30)) as client:
        await client.reset("t")
        with pytest.raises(CapacityError):
            await client.step(LS)
    assert connections == 1


async def unponged(connection: ServerConnection) -> None:
    """A server that answers no ping, as behind a tunnel that drops them."""
    send = connection.protocol.send_frame
    connection.protocol.send_frame = lambda frame: None if frame.opcode is Opcode.PONG else send(frame)  # type: ignore[method-assign]

    async def slow(message: dict[str, Any]) -> str | None:
        if message["type"] == "step":
            await asyncio.sleep(0.8)
        return await polite(message)

    await answering(connection, slow)


@pytest.mark.parametrize(
    ("interval_s", "timeout_s", "survives"), [(0.1, None, True), (None, None, True), (0.1, 0.2, False)]
)
async def test_a_tunnel_that_drops_pings_ends_a_long_step_only_if_that_was_asked_for(
    interval_s: float | None, timeout_s: float | None, survives: bool
) -> None:
    options = ClientOptions(ping_interval_s=interval_s, ping_timeout_s=timeout_s)
    async with misbehaving(unponged, ping_interval=None) as url, EnvClient(url, options) as client:
        await client.reset("t")
        if survives:
            assert (await client.step(LS)).output == "ls"
        else:
            with pytest.raises(EnvironmentLostError):
                await client.step(LS)


async def test_a_long_generation_without_a_word_is_survived() -> None:
    """Ninety seconds of silence under pings each twenty, at a hundredth of the time."""
    options = ClientOptions(ping_interval_s=0.2, ping_timeout_s=0.2)
    async with (
        misbehaving(lambda c: answering(c, polite), ping_interval=0.2, ping_timeout=0.2) as url,
        EnvClient(url, options) as client,
    ):
        await client.reset("t")
        await asyncio.sleep(0.9)
        assert (await client.step(LS)).output == "ls"


async def test_a_silent_server_neither_answers_nor_lets_go_and_is_left_in_time() -> None:
    over = asyncio.Event()

    async def silent(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await over.wait()

    async with misbehaving(silent, close_timeout=0.1) as url:
        client = EnvClient(url)
        await client.connect()
        started = time.monotonic()
        with pytest.raises(DeadlineError):
            await client.reset_raw({}, deadline_s=0.2)
        await client.close()
        assert time.monotonic() - started < 3
        over.set()


async def test_an_answer_beyond_the_bound_is_the_end_of_the_connection() -> None:
    async def flood(message: dict[str, Any]) -> str | None:
        return observation(output="y" * 200_000) if message["type"] == "step" else await polite(message)

    options = ClientOptions(max_answer_bytes=100_000)
    async with misbehaving(lambda c: answering(c, flood)) as url, EnvClient(url, options) as client:
        await client.reset("t")
        with pytest.raises(EnvironmentLostError, match="1009"):
            await client.step(LS)


async def test_the_token_goes_along_and_is_not_carried_to_where_a_redirect_points() -> None:
    seen: list[str | None] = []

    def note(connection: ServerConnection, request: Any) -> Any:
        seen.append(request.headers.get("Authorization"))
        return None

    async with misbehaving(lambda c: answering(c, polite), process_request=note) as url:

        def away(connection: ServerConnection, request: Any) -> Any:
            response = connection.respond(307, "")
            response.headers["Location"] = url.replace("http", "ws") + "/ws"
            return response

        async with EnvClient(url, ClientOptions(token="open-sesame")) as client:
            await client.reset("t")
        assert seen == ["Bearer open-sesame"]
        async with misbehaving(lambda c: answering(c, polite), process_request=away) as elsewhere:
            with pytest.raises(EnvironmentLostError, match="307"):
                await EnvClient(elsewhere, ClientOptions(token="open-sesame")).connect()
        assert len(seen) == 1
