"""The closed tables of end reasons and causes: each row is made to happen, in real sandboxes where one is involved."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from termrl.agent.episode import run_episode
from termrl.agent.prompts import opening
from termrl.agent.types import Episode, Limits, Policy
from termrl.environment.protocol import Environment
from termrl.environment.remote import RemoteEnvironmentFactory
from termrl.environment.remote_config import RemoteSettings
from termrl.environment.terminal import TerminalEnvironment
from termrl.errors import PolicyError
from termrl.sandboxes import open_provider
from termrl.sandboxes.base import Sandbox, SandboxProvider
from termrl.verifier.causes import CAUSES, END_REASONS, Cause, EndReason, Rule
from tests.agent.fakes import ScriptedPolicy, reply
from tests.docker import GROUP, need_docker
from tests.verifier.tiny import SECRET, tiny_task

SOLVED = f"```bash\necho {SECRET} > answer.txt\n```"
DONE = "TASK_COMPLETE"
TESTS = {
    "tiny": None,
    "crash": "exit 1",
    "slow": "sleep 60",
    "bad": "echo 1.5 > /logs/verifier/reward.txt",
    "fetch": "curl -sS https://astral.sh/uv/install.sh | sh || echo 'curl: (6) Could not resolve host: astral.sh'",
    "fragile": "set -e; . ./settings.sh; while [ -e hang ]; do sleep 0.05; done; echo 0 > /logs/verifier/reward.txt",
}


def bash(command: str) -> str:
    return f"```bash\n{command}\n```"


class World:
    """One task set, one provider, and the sandboxes that it made."""

    def __init__(self, provider: SandboxProvider, folder: Path) -> None:
        self.provider = provider
        self.tasks = {
            id: tiny_task(
                folder,
                id=id,
                verifier_timeout_s={"slow": 0.7, "fragile": 2.5}.get(id, 10.0),
                files={"settings.sh": "x=1\n"},
                **({} if test is None else {"test": test}),
            )
            for id, test in TESTS.items()
        }
        self.made: list[Sandbox] = []
        create = provider.create

        async def watched(spec: Any) -> Sandbox:
            self.made.append(await create(spec))
            return self.made[-1]

        provider.create = watched  # type: ignore[method-assign]

    async def attempt(
        self, policy: Policy, task: str = "tiny", environment: Environment | None = None, **limits: Any
    ) -> Episode:
        environment = environment or TerminalEnvironment(self.tasks, self.provider)
        try:
            return await run_episode(
                environment,
                policy,
                task_id=task,
                opening=opening("first-steps"),
                limits=Limits(**{"max_turns": 3, "command_timeout_s": 5.0, "max_format_errors": 1, **limits}),
                seed=1,
            )
        finally:
            await environment.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_provider("bubblewrap") as provider:
        yield World(provider, tmp_path)


async def lose_the_sandbox(world: World) -> Episode:
    async def kill_it() -> str:
        world.provider.kill(world.made[-1].id)  # type: ignore[attr-defined]
        return bash("sleep 5")

    return await world.attempt(ScriptedPolicy(kill_it))


async def break_the_environment(world: World) -> Episode:
    async def break_it() -> str:
        async def broken(*_args: Any, **_fields: Any) -> Any:
            raise OSError("the connection to the environment was reset")

        world.made[-1].exec = broken  # type: ignore[method-assign]
        return bash("true")

    return await world.attempt(ScriptedPolicy(break_it))


async def start_no_sandbox(world: World) -> Episode:
    await world.provider.close()
    return await world.attempt(ScriptedPolicy(DONE))


async def find_no_slot(world: World) -> Episode:
    async def full(connection: ServerConnection) -> None:
        full = {"message": "full", "code": "CAPACITY_REACHED", "active_sessions": 1, "max_sessions": 1}
        await connection.send(json.dumps({"type": "error", "data": full}))

    async with serve(full, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        factory = RemoteEnvironmentFactory(url, settings=RemoteSettings(capacity_wait_s=0.1))
        return await world.attempt(ScriptedPolicy(DONE), environment=factory.create())


async def find_no_image(world: World) -> Episode:
    need_docker()
    async with open_provider("docker", images={"pull_attempts": 1}) as provider:
        tiny = world.tasks["tiny"]
        spec = replace(tiny.sandbox, image="127.0.0.1:9/none:1", host_userland=False)
        tasks = {"tiny": replace(tiny, sandbox=spec)}
        return await world.attempt(ScriptedPolicy(DONE), environment=TerminalEnvironment(tasks, provider))


Run = Callable[[World], Awaitable[Episode]]

BY_CAUSE: dict[Cause, Run] = {
    Cause.SANDBOX_START: start_no_sandbox,
    Cause.SANDBOX_LOST: lose_the_sandbox,
    Cause.ENVIRONMENT_LOST: break_the_environment,
    Cause.CAPACITY: find_no_slot,
    Cause.IMAGE_UNAVAILABLE: find_no_image,
    Cause.ENGINE_ERROR: lambda w: w.attempt(ScriptedPolicy(PolicyError("the endpoint refused the connection"))),
    Cause.BOOTSTRAP_FAILED: lambda w: w.attempt(ScriptedPolicy(DONE), "fetch"),
    Cause.VERIFIER_CRASH: lambda w: w.attempt(ScriptedPolicy(DONE), "crash"),
    Cause.VERIFIER_TIMEOUT: lambda w: w.attempt(ScriptedPolicy(DONE), "slow"),
    Cause.BAD_REWARD: lambda w: w.attempt(ScriptedPolicy(DONE), "bad"),
    Cause.CANCELLED: lambda w: w.attempt(ScriptedPolicy(reply("", "abort"))),
    Cause.TESTS_FAILED: lambda w: w.attempt(ScriptedPolicy(DONE)),
    Cause.BROKE_VERIFIER: lambda w: w.attempt(ScriptedPolicy(bash("rm settings.sh"), DONE), "fragile"),
    Cause.VERIFIER_TIMEOUT_BY_POLICY: lambda w: w.attempt(ScriptedPolicy(bash("touch hang"), DONE), "fragile"),
    Cause.WALL_CAP: lambda w: w.attempt(ScriptedPolicy(bash("sleep 9")), wall_s=0.3),
}

BY_END_REASON: dict[EndReason, Run] = {
    EndReason.TASK_COMPLETE: lambda w: w.attempt(ScriptedPolicy(SOLVED, DONE)),
    EndReason.NO_COMMAND: lambda w: w.attempt(ScriptedPolicy(SOLVED, "no command", "none again")),
    EndReason.MAX_TURNS: lambda w: w.attempt(ScriptedPolicy(SOLVED, bash("true"))),
    EndReason.LENGTH: lambda w: w.attempt(ScriptedPolicy(SOLVED, reply("```bash\nrm answer.txt", "length"))),
    EndReason.CONTEXT: lambda w: w.attempt(ScriptedPolicy(SOLVED, reply("```bash\nrm answer.txt", "context"))),
    EndReason.TIMEOUT: lambda w: w.attempt(ScriptedPolicy(SOLVED, bash("sleep 9")), wall_s=0.5),
    EndReason.POLICY_ERROR: lambda w: w.attempt(ScriptedPolicy(SOLVED, PolicyError("gone"))),
    EndReason.ENVIRONMENT_ERROR: lose_the_sandbox,
    EndReason.ABORTED: lambda w: w.attempt(ScriptedPolicy(SOLVED, reply("", "abort"))),
}


def test_every_row_is_made_to_happen() -> None:
    assert set(CAUSES) == set(BY_CAUSE) == set(Cause)
    assert set(END_REASONS) == set(BY_END_REASON) == set(EndReason)


# see tests/conftest.py
ON_DOCKER = pytest.mark.xdist_group(GROUP)


@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=ON_DOCKER if run is find_no_image else ()) for cause, run in BY_CAUSE.items()]
)
async def test_each_cause_comes_up_and_gives_what_its_row_says(world: World, cause: Cause) -> None:
    episode = await BY_CAUSE[cause](world)
    assert episode.verdict is not None and episode.verdict.cause is cause, episode.verdict
    assert episode.reward == CAUSES[cause].reward
    looked_into = episode.verdict.attribution is not None and episode.verdict.attribution.extra_runs > 0
    by_policy = cause in (Cause.BROKE_VERIFIER, Cause.VERIFIER_TIMEOUT_BY_POLICY)
    assert looked_into == (CAUSES[cause].attributed or by_policy)


@pytest.mark.parametrize("end_reason", BY_END_REASON)
async def test_each_end_reason_comes_up_and_does_to_a_solved_task_what_its_row_says(
    world: World, end_reason: EndReason
) -> None:
    episode = await BY_END_REASON[end_reason](world)
    assert episode.end_reason is end_reason, episode
    expected = {Rule.GRADED: 1.0, Rule.CUT: 0.0, Rule.NEVER: None}[END_REASONS[end_reason].rule]
    assert episode.reward == expected


async def test_a_cut_episode_is_graded_in_evaluation(world: World) -> None:
    episode = await world.attempt(ScriptedPolicy(SOLVED, bash("sleep 9")), wall_s=0.5, grade_cut=True)
    assert (episode.end_reason, episode.reward) == (EndReason.TIMEOUT, 1.0)
