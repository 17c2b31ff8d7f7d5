"""``termrl serve`` from the client's side: an episode there is the episode here."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from termrl.agent.episode import run_episode
from termrl.agent.prompts import opening
from termrl.agent.types import Episode, Limits
from termrl.environment.client import EnvClient, SyncEnvClient
from termrl.environment.protocol import Action, Environment
from termrl.environment.remote import RemoteEnvironmentFactory
from termrl.environment.remote_config import RemoteSettings
from termrl.environment.server.config import ServeConfig
from termrl.environment.server.running import EnvironmentServer, serve
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.errors import ConfigError, EnvironmentLostError, TaskError
from termrl.sandboxes.base import SandboxProvider
from termrl.sandboxes.sweep import sweep
from termrl.tasks.taskset import TaskSet
from termrl.verifier.verdict import Cause, EndReason
from tests.agent.fakes import ScriptedPolicy
from tests.environment.client.conftest import settled
from tests.environment.client.test_remote import DONE, SOLVE, bash

LIMITS = Limits(max_turns=6, command_timeout_s=2.0, output_chars=400)
SETTINGS = RemoteSettings(capacity_wait_s=20)


@pytest.fixture
async def server(tasks: Path) -> AsyncIterator[EnvironmentServer]:
    async with serve(ServeConfig(tasks=(tasks,), port=0, max_sessions=2), {}) as server:
        yield server


async def attempt(environment: Environment, replies: list[Any], task: str) -> Episode:
    try:
        return await run_episode(
            environment,
            ScriptedPolicy(*replies),
            task_id=task,
            opening=opening("first-steps"),
            limits=LIMITS,
            seed=3,
        )
    finally:
        await environment.close()


SCRIPTS = {
    "solved": ("tiny", [bash("ls -a; pwd; id -un"), SOLVE, DONE]),
    "not solved": ("tiny", [bash("echo wrong > answer.txt; exit 3"), DONE]),
    "slow, loud and in the background": (
        "tiny",
        [
            bash("sleep 60"),
            bash("yes | head -c 300000"),
            bash("sleep 60 &"),
            bash("printf '\\377\\n'; cat nothing"),
            DONE,
        ],
    ),
    "tests broken by the policy": ("fragile", [bash("rm settings.sh"), DONE]),
    "tests that never score": ("crash", [DONE]),
    "a reward that is none": ("bad", [DONE]),
}
_CHANGES = ("duration_s", "seconds", "output_tail")


def comparable(value: Any) -> Any:
    """Without what differs from run to run: times, and paths of temporary folders."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items() if key not in _CHANGES}
    return value


@pytest.mark.parametrize(("task", "replies"), SCRIPTS.values(), ids=SCRIPTS.keys())
async def test_an_episode_behind_the_server_is_the_one_in_process(
    server: EnvironmentServer, provider: SandboxProvider, tasks: Path, task: str, replies: list[str]
) -> None:
    remote = await attempt(RemoteEnvironmentFactory(server.url, settings=SETTINGS).create(), replies, task)
    local = await attempt(LocalEnvironmentFactory(TaskSet.load(tasks), provider).create(), replies, task)
    assert (remote.end_reason, remote.reward, remote.error) == (local.end_reason, local.reward, local.error)
    assert remote.verdict is not None and local.verdict is not None
    assert comparable(remote.verdict.model_dump()) == comparable(local.verdict.model_dump())
    assert remote.verdict.output_tail == local.verdict.output_tail
    there, here = remote.info["reset"], local.info["reset"]
    assert {key: there[key] for key in here} == here
    assert remote.instruction == local.instruction
    for turn, twin in zip(remote.turns, local.turns, strict=True):
        assert (turn.command, turn.observation, turn.exit_code) == (twin.command, twin.observation, twin.exit_code)
        assert (turn.timed_out, turn.truncated_bytes, turn.background, turn.error) == (
            twin.timed_out,
            twin.truncated_bytes,
            twin.background,
            twin.error,
        )


async def test_more_episodes_than_slots_all_come_to_their_end(server: EnvironmentServer) -> None:
    factory = RemoteEnvironmentFactory(server.url, settings=SETTINGS)
    episodes = await asyncio.gather(*(attempt(factory.create(), [SOLVE, DONE], "tiny") for _ in range(5)))
    assert [episode.reward for episode in episodes] == [1.0] * 5
    assert any(episode.timings["admission_s"] > 0 for episode in episodes)
    assert await settled(lambda: server.sessions.admission.active == 0)


async def test_a_task_that_is_not_there_is_the_same_error_as_in_process(server: EnvironmentServer) -> None:
    environment = RemoteEnvironmentFactory(server.url).create()
    with pytest.raises(TaskError, match="no task 'tinny'") as caught:
        await environment.reset("tinny")
    assert caught.value.hint == "did you mean 'tiny'?"
    await environment.close()


async def test_a_cancelled_episode_frees_its_slot_and_its_sandbox(server: EnvironmentServer) -> None:
    environment = RemoteEnvironmentFactory(server.url).create()
    running = asyncio.create_task(attempt(environment, [bash("sleep 60")], "tiny"))
    assert await settled(lambda: server.provider.live == 1)
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await settled(lambda: server.provider.live == 0 and server.sessions.admission.active == 0)


async def test_a_fresh_session_leaves_missing_verdicts_to_its_asker(server: EnvironmentServer) -> None:
    environment = await RemoteEnvironmentFactory(server.url, settings=SETTINGS).fresh("tiny")
    assert environment.state().terminal_ready
    assert (await environment.step(Action(action_type="evaluate"))).reward == 0.0
    await environment.close()


async def test_background_sessions_go_through(server: EnvironmentServer) -> None:
    async with EnvClient(server.url) as client:
        await client.reset("tiny", seed=1, episode_id="e-7")
        await client.step(Action(command="cat", block=False, session_id="s1"))
        assert "hello" in (await client.step(Action(action_type="write", command="hello", session_id="s1"))).output
        await client.step(Action(action_type="kill", session_id="s1"))
        written = await client.step(Action(action_type="write_file", file_path="a.txt", content="ü"))
        assert written.success and (await client.step(Action(command="cat a.txt"))).output == "ü"
        state = await client.state()
        assert (state.episode_id, state.last_command, state.step_count) == ("e-7", "cat a.txt", 5)


async def test_the_token_opens_a_guarded_server_and_nothing_else_does(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    monkeypatch.delenv("TERMRL_TOKEN", raising=False)
    async with serve(ServeConfig(tasks=(tasks,), port=0, token_file=token), {}) as server:
        right = RemoteEnvironmentFactory(server.url, settings=RemoteSettings(token_file=token))
        assert (await attempt(right.create(), [SOLVE, DONE], "tiny")).reward == 1.0
        with pytest.raises(ConfigError, match="without a token"):
            await attempt(RemoteEnvironmentFactory(server.url).create(), [DONE], "tiny")
        token.write_text("another-token-altogether")
        wrong = RemoteEnvironmentFactory(server.url, settings=RemoteSettings(token_file=token))
        with pytest.raises(ConfigError, match="refuses the token") as caught:
            await attempt(wrong.create(), [DONE], "tiny")
    assert "altogether" not in str(caught.value)


@pytest.fixture
def program(tasks: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "termrl", "serve", str(tasks), "--port", "0", "--stop-with-parent"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stdout is not None
        found = re.search(r"listening on (\S+)", process.stdout.readline())
        assert found is not None
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


async def test_a_server_that_is_killed_in_mid_step_is_a_lost_environment(
    program: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = program

    async def kill_it() -> str:
        asyncio.get_running_loop().call_later(0.5, process.send_signal, signal.SIGKILL)
        return bash("sleep 30")

    started = time.monotonic()
    episode = await attempt(RemoteEnvironmentFactory(url).create(), [kill_it], "tiny")
    assert (episode.end_reason, episode.reward) == (EndReason.ENVIRONMENT_ERROR, None)
    assert episode.verdict is not None and episode.verdict.cause is Cause.ENVIRONMENT_LOST
    assert time.monotonic() - started < 10
    process.wait(10)
    sweep()


def test_the_sync_client_works_a_task(program: tuple[subprocess.Popen[str], str]) -> None:
    process, url = program
    with SyncEnvClient(url) as client:
        reset = client.reset("tiny")
        assert client.budgets.verify_s == reset.info["verifier_timeout_sec"] == 20
        assert client.step(Action(command="echo hi")).output == "hi\n"
        assert client.step(Action(action_type="evaluate")).reward == 0.0
        process.terminate()
        process.wait(30)
        with pytest.raises(EnvironmentLostError):
            client.step(Action(command="echo hi"))
