"""openenv's ways to a client: a typed one of one's own, and ``AutoEnv`` without a package."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

# first: it imports openenv without what no client needs
from termrl.environment.server.openenv import Action, Observation, State  # isort: skip
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from pydantic import Field

from tests.environment.server.served import SECRET, Server, wait_until


class Act(Action):
    """What tbench2's own client sends for an exec or an evaluate."""

    action_type: str = "exec"
    command: str = ""
    session_id: str | None = None
    block: bool = True
    wait_seconds: float | None = None
    file_path: str = ""
    content: str = ""


class Seen(Observation):
    """The part of an observation that is looked at."""

    output: str = ""
    info: dict[str, Any] = Field(default_factory=dict)


class TypedClient(EnvClient[Act, Seen, State]):
    """A client written as tbench2's is: every field sent with every action, reward and done from the envelope."""

    def _step_payload(self, action: Act) -> dict[str, Any]:
        return action.model_dump(exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Seen]:
        seen = payload["observation"]
        observation = Seen(output=seen["output"], info=seen["info"], reward=payload["reward"], done=payload["done"])
        return StepResult(observation=observation, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(episode_id=payload["episode_id"], step_count=payload["step_count"])


async def test_a_typed_client_plays_an_episode(server: Server) -> None:
    async with TypedClient(base_url=server.url) as env:
        await env.reset(task_id="one", episode_id="typed")
        result = await env.step(Act(command=f"echo {SECRET} | tee answer.txt"))
        assert (result.observation.output, result.observation.info["exit_code"]) == (SECRET + "\n", 0)
        result = await env.step(Act(action_type="evaluate"))
        assert (result.reward, result.done) == (1.0, True)
        assert (await env.state()).model_dump(include={"episode_id", "step_count"}) == {
            "episode_id": "typed",
            "step_count": 2,
        }
    assert wait_until(server.is_empty)


async def test_typed_clients_at_once_are_strangers(server: Server) -> None:
    async def one(number: int) -> str:
        async with TypedClient(base_url=server.url) as env:
            await env.reset(task_id="one")
            await env.step(Act(action_type="write_file", file_path="mine", content=str(number)))
            return (await env.step(Act(command="sleep 0.1; cat mine; ls | wc -l"))).observation.output

    said = await asyncio.gather(*(one(number) for number in range(6)))
    # README, and what it wrote itself
    assert said == [f"{number}2\n" for number in range(6)]
    assert wait_until(server.is_empty)


def test_auto_env_connects_by_url_without_a_package(server: Server) -> None:
    from openenv.auto.auto_env import AutoEnv

    with AutoEnv.from_env("termrl", base_url=server.url, skip_install=True).sync() as env:
        assert env.reset(task_id="two").observation["task_id"] == "two"
        assert env.step({"command": "pwd"}).observation["output"] == "/app\n"
    assert wait_until(server.is_empty)


def test_auto_env_says_that_nothing_listens() -> None:
    from openenv.auto.auto_env import AutoEnv

    with pytest.raises(ConnectionError):
        AutoEnv.from_env("termrl", base_url="http://127.0.0.1:9", skip_install=True)
