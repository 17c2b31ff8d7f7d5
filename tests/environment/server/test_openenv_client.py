"""openenv's own client, from its wheel, unchanged."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.environment.server.served import SECRET, Server, served, wait_until


@pytest.fixture(scope="module", autouse=True)
def lean() -> Iterator[None]:
    """Without gradio, which costs seconds and which a client does not use."""
    absent = "gradio" not in sys.modules
    if absent:
        sys.modules["gradio"] = None  # pyright: ignore[reportArgumentType]
    yield
    if absent:
        del sys.modules["gradio"]


def client_of(server: Server, **options: Any) -> Any:
    from openenv.core.generic_client import GenericEnvClient

    return GenericEnvClient(base_url=server.url, **options)


async def test_an_episode_from_reset_to_reward(server: Server) -> None:
    async with client_of(server) as env:
        result = await env.reset(task_id="one", seed=1, episode_id="mine")
        assert (result.reward, result.done) == (0.0, False)
        assert result.observation["instruction"]
        result = await env.step({"action_type": "exec", "command": f"echo {SECRET} | tee answer.txt"})
        assert (result.reward, result.done, result.observation["output"]) == (0.0, False, SECRET + "\n")
        state = await env.state()
        assert (state["episode_id"], state["step_count"]) == ("mine", 1)
        result = await env.step({"action_type": "evaluate"})
        assert (result.reward, result.done, result.observation["info"]["harness"]) == (1.0, True, "tests/test.sh")
    assert wait_until(server.is_empty)


def test_the_sync_client_too(server: Server) -> None:
    with client_of(server).sync() as env:
        env.reset(task_id="one")
        assert env.step({"command": "echo sync"}).observation["output"] == "sync\n"
    assert wait_until(server.is_empty)


async def test_errors_are_its_errors_and_the_session_goes_on(server: Server) -> None:
    async with client_of(server) as env:
        with pytest.raises(RuntimeError, match="EXECUTION_ERROR"):
            await env.reset(task_id="../../etc")
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            await env.step({"nonsense": 1})
        assert (await env.reset(task_id="two")).observation["task_id"] == "two"


async def test_what_it_drops_in_mid_step_is_gone_before_it_comes_back(server: Server) -> None:
    """After a message time-out it opens another session by itself: the earlier one must not stay."""
    env = client_of(server, message_timeout_s=0.5)
    await env.reset(task_id="one")
    with pytest.raises(asyncio.TimeoutError):
        await env.step({"command": "sleep 30"})
    result = await env.step({"command": "true"})
    assert result.observation["success"] is False and "reset" in result.observation["error"]
    assert wait_until(lambda: server.active == 1)
    await env.close()
    assert wait_until(server.is_empty)


async def test_beyond_capacity_it_is_told_so(tasks: Any) -> None:
    with served(tasks, "--max-sessions", "1") as server:
        async with client_of(server) as first:
            await first.reset(task_id="one")
            second = client_of(server)
            with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
                await second.reset(task_id="one")
            await second.close()
        third = client_of(server)
        assert (await third.reset(task_id="one")).reward == 0.0
        await third.close()


async def test_a_token_goes_in_its_headers(tasks: Any) -> None:
    token = "a-token-of-some-length"
    with served(tasks, env={"TERMRL_TOKEN": token}, token=token) as server:
        async with client_of(server, headers=server.headers) as env:
            assert (await env.reset(task_id="one")).reward == 0.0
            assert (await env.step({"command": "env | grep -c TERMRL_TOKEN"})).observation["output"] == "0\n"
        with pytest.raises(ConnectionError):
            await client_of(server).reset(task_id="one")
