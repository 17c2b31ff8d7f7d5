"""The thin client against openenv's own server, with an environment that has nothing to do with terminals."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pydantic
import pytest
import websockets

from termrl.environment.address import Address, read_token
from termrl.environment.budgets import Budgets
from termrl.environment.client import ClientOptions, EnvClient, SyncEnvClient
from termrl.environment.protocol import Action
from termrl.errors import (
    CapacityError,
    CommandError,
    ConfigError,
    DeadlineError,
    EnvironmentLostError,
    ProtocolError,
    ServerError,
)
from tests.environment.upstreams import echo_app, hosted, hosted_in_thread

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    async with hosted(echo_app(max_sessions=2)) as url:
        yield url


async def test_any_environment_can_be_driven(echo: str) -> None:
    async with EnvClient(echo) as client:
        assert await client.reset_raw({"flavour": "plain"}) == ({"metadata": {}, "echoed": "ready plain"}, None, False)
        observation, reward, done = await client.step_raw({"message": "hello"})
        assert (observation["echoed"], reward, done) == ("hello", 0.5, False)
        assert (await client.step_raw({"message": "bye"}))[2] is True
        assert (await client.state()).step_count == 2


def test_code_without_an_event_loop_has_the_same_client() -> None:
    with hosted_in_thread(echo_app()) as url, SyncEnvClient(url) as client:
        client.reset_raw({"episode_id": "e1"})
        assert client.step_raw({"message": "hello"})[0]["echoed"] == "hello"
        assert (client.state().episode_id, client.state_raw()["step_count"]) == ("e1", 1)
        with pytest.raises(ServerError):
            client.step_raw({"message": "raise"})
        client.close()
        with pytest.raises(EnvironmentLostError):
            client.step_raw({"message": "hello"})


@pytest.mark.parametrize(
    ("action", "code", "says"),
    [
        ({"message": "raise"}, "EXECUTION_ERROR", "the echo broke"),
        ({"massage": "x"}, "VALIDATION_ERROR", "message: Field required"),
    ],
)
async def test_a_coded_error_is_typed_and_the_session_goes_on(
    echo: str, action: dict[str, str], code: str, says: str
) -> None:
    async with EnvClient(echo) as client:
        await client.reset_raw({})
        with pytest.raises(ServerError, match=says) as caught:
            await client.step_raw(action)
        assert caught.value.code == code
        assert (await client.step_raw({"message": "still here"}))[0]["echoed"] == "still here"


async def test_an_environment_of_another_kind_is_told_apart_from_a_terminal(echo: str) -> None:
    async with EnvClient(echo) as client:
        await client.reset_raw({})
        with pytest.raises(ServerError, match="VALIDATION_ERROR"):
            await client.step(Action(command="ls"))


async def test_no_slot_is_a_capacity_error_and_names_the_slots(echo: str) -> None:
    async with EnvClient(echo) as first, EnvClient(echo) as second, EnvClient(echo) as third:
        await first.reset_raw({})
        await second.reset_raw({})
        with pytest.raises(CapacityError, match="2 of 2"):
            await third.reset_raw({})
        with pytest.raises(CapacityError):
            await third.reset_raw({})


async def test_a_slot_is_waited_for_until_one_comes_free(echo: str) -> None:
    async with EnvClient(echo) as first, EnvClient(echo) as second:
        await first.reset_raw({})
        await second.reset_raw({})
        async with EnvClient(echo, ClientOptions(capacity_wait_s=20)) as third:
            waiting = asyncio.create_task(third.reset_raw({}))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await first.close()
            await waiting
            assert 0.3 <= third.waited_s < 10
            assert (await third.step_raw({"message": "in"}))[0]["echoed"] == "in"


async def test_waiting_for_a_slot_ends_at_its_deadline(echo: str) -> None:
    async with EnvClient(echo) as first, EnvClient(echo) as second:
        await first.reset_raw({})
        await second.reset_raw({})
        started = time.monotonic()
        async with EnvClient(echo, ClientOptions(capacity_wait_s=0.4)) as third:
            with pytest.raises(CapacityError) as caught:
                await third.reset_raw({})
        assert 0.4 <= time.monotonic() - started < 3
        assert caught.value.waited_s >= 0.4


async def test_after_a_deadline_the_connection_is_gone_and_no_late_answer_is_taken(echo: str) -> None:
    async with EnvClient(echo) as client:
        await client.reset_raw({})
        with pytest.raises(DeadlineError, match=r"0\.1 s"):
            await client.step_raw({"message": "late", "sleep_s": 0.3}, deadline_s=0.1)
        await asyncio.sleep(0.4)
        with pytest.raises(EnvironmentLostError):
            await client.step_raw({"message": "next"})
        assert not client.connected


async def test_a_call_that_is_cancelled_ends_the_connection(echo: str) -> None:
    async with EnvClient(echo) as client:
        await client.reset_raw({})
        call = asyncio.create_task(client.step_raw({"message": "x", "sleep_s": 0.3}))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(EnvironmentLostError):
            await client.step_raw({"message": "next"})


async def test_a_closed_client_is_not_opened_again(echo: str) -> None:
    client = EnvClient(echo)
    with pytest.raises(EnvironmentLostError, match="not connected"):
        await client.reset_raw({})
    await client.connect()
    await client.close()
    await client.close()
    with pytest.raises(EnvironmentLostError):
        await client.reset_raw({})
    with pytest.raises(EnvironmentLostError, match="new client"):
        await client.connect()


async def test_one_call_at_a_time(echo: str) -> None:
    async with EnvClient(echo) as client:
        await client.reset_raw({})
        first = asyncio.create_task(client.step_raw({"message": "a", "sleep_s": 0.1}))
        await asyncio.sleep(0.02)
        with pytest.raises(RuntimeError, match="one call at a time"):
            await client.step_raw({"message": "b"})
        assert (await first)[0]["echoed"] == "a"


@pytest.mark.parametrize("text", ["x" * (17 * 1024 * 1024), "half a pair: \ud800"], ids=["too large", "surrogate"])
async def test_what_cannot_be_sent_is_refused_before_and_the_session_goes_on(echo: str, text: str) -> None:
    async with EnvClient(echo) as client:
        await client.reset_raw({})
        with pytest.raises(CommandError):
            await client.step_raw({"message": text})
        assert (await client.step_raw({"message": "ok"}))[0]["echoed"] == "ok"


async def test_an_answer_of_megabytes_comes_through(echo: str) -> None:
    text = "ü" * (4 * 1024 * 1024)
    async with EnvClient(echo) as client:
        await client.reset_raw({})
        assert (await client.step_raw({"message": text}))[0]["echoed"] == text


async def test_nobody_there_is_said_so() -> None:
    with pytest.raises(EnvironmentLostError, match=r"no environment server answers at http://127\.0\.0\.1:1"):
        await EnvClient("http://127.0.0.1:1").connect()


async def test_a_web_server_without_the_endpoint_is_said_so() -> None:
    from starlette.applications import Starlette

    async with hosted(Starlette()) as url:
        with pytest.raises(ConfigError, match="no OpenEnv endpoint"):
            await EnvClient(url).connect()


def test_client_deadlines_lie_above_every_budget_that_the_server_tells() -> None:
    budgets = Budgets(grace_s=5).told({"command_timeout_s": 300.0, "verifier_timeout_sec": 1800})
    assert budgets.of(Action(command="x")) == 305
    assert budgets.of(Action(command="x", wait_seconds=10)) == 305
    assert budgets.of(Action(command="x", wait_seconds=1000)) == 1005
    assert budgets.of(Action(action_type="wait", wait_seconds=900)) == 905
    assert budgets.once(Action(action_type="evaluate")) == 1805
    assert budgets.once(Action(action_type="evaluate", wait_seconds=10)) == 1805
    # the server may run the tests four times, twice of them after a reset
    assert budgets.of(Action(action_type="evaluate")) >= 4 * 1805 + 2 * budgets.reset_s


@pytest.mark.parametrize("told", [None, 0, -5, float("nan"), float("inf"), True, "900"])
def test_a_budget_that_is_none_is_not_one(told: object) -> None:
    budgets = Budgets(grace_s=5).told({"command_timeout_s": told, "verifier_timeout_sec": told})
    assert (budgets.of(Action()), budgets.once(Action(action_type="evaluate"))) == (65, 905)


@pytest.mark.parametrize(
    ("url", "socket", "http"),
    [
        ("http://localhost:8003", "ws://localhost:8003/ws", "http://localhost:8003"),
        ("https://me-env.hf.space/", "wss://me-env.hf.space/ws", "https://me-env.hf.space"),
        ("ws://10.0.0.1:8003/ws", "ws://10.0.0.1:8003/ws", "http://10.0.0.1:8003"),
        ("wss://host/base/ws/", "wss://host/base/ws", "https://host/base"),
        ("http://[::1]:80", "ws://[::1]:80/ws", "http://[::1]:80"),
    ],
)
def test_urls(url: str, socket: str, http: str) -> None:
    address = Address.of(url)
    assert (address.socket, address.http) == (socket, http)


@pytest.mark.parametrize("url", ["", "host:8003", "ftp://host", "http://", "http://h:99999", "http://h/?token=x"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        EnvClient(url)


@pytest.mark.parametrize("url", ["http://user:secret@host", "ws://secret@host:80"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EnvClient(url)
    assert "secret" not in str(caught.value) + str(caught.value.hint)


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERMRL_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_text("from-the-file\n")
    assert read_token(None) is None
    assert read_token(file) == "from-the-file"
    monkeypatch.setenv("TERMRL_TOKEN", "from-the-environment")
    assert read_token(None) == "from-the-environment"
    assert read_token(file) == "from-the-file"
    file.write_text("two\nlines")
    for bad in (file, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=bad.name) as caught:
            read_token(bad)
        assert "lines" not in str(caught.value).replace("line of", "")


def test_the_client_needs_websockets_and_pydantic_and_nothing_else() -> None:
    allowed = [Path(module.__file__ or "").parent for module in (websockets, pydantic)]
    site = allowed[0].parent
    script = f"""
import sys, time
sys.path[:0] = [{str(SOURCE)!r}, {str(site)!r}]
import importlib.abc
class Only(importlib.abc.MetaPathFinder):
    fine = {{"termrl", "websockets", "pydantic", "pydantic_core", "annotated_types"}}
    fine |= {{"typing_extensions", "typing_inspection"}}
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in self.fine | sys.stdlib_module_names and not first.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Only())
import termrl.environment.client, termrl.environment.remote
assert termrl.environment.client.EnvClient and termrl.environment.remote.RemoteEnvironmentFactory
"""
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_client_is_quick_and_pulls_no_framework() -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(SOURCE)!r})
started = time.process_time()
import termrl.environment.client
print(time.process_time() - started)
heavy = {{"openenv", "torch", "starlette", "openai", "fastapi", "aiohttp", "numpy", "transformers"}}
assert not heavy & {{name.partition(".")[0] for name in sys.modules}}, heavy & set(sys.modules)
"""
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    assert min(float(run.stdout) for run in runs) < 0.3


@pytest.mark.parametrize("error", [CapacityError("x"), DeadlineError("x"), ProtocolError("x"), ServerError("C", "x")])
def test_every_error_of_a_server_is_the_infrastructures(error: CapacityError | EnvironmentLostError) -> None:
    assert error.cause in ("capacity", "environment_lost")
