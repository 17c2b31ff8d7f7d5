"""Any tbench2 server, driven as training drives it: through the client and, where the server is old, the adapter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from termrl.agent.episode import run_episode
from termrl.agent.prompts import opening
from termrl.agent.types import Episode, Limits
from termrl.environment.protocol import Action, Observation
from termrl.environment.remote import RemoteEnvironment
from termrl.environment.verdicts import verdict_of
from termrl.errors import SandboxStartError, TaskError
from termrl.verifier.verdict import Cause, EndReason, Outcome, Verdict
from tests.agent.fakes import ScriptedPolicy
from tests.upstream.conftest import Upstream
from tests.upstream.tasks import (
    BAD_REWARD,
    NO_REWARD,
    SLOW_TESTS,
    SOLVABLE,
    SOLVE,
    VERIFIER_TIMEOUT_S,
    WORKDIR,
)


@asynccontextmanager
async def begun(upstream: Upstream, task_id: str = SOLVABLE) -> AsyncIterator[tuple[RemoteEnvironment, Observation]]:
    environment = upstream.factory.create()
    try:
        yield environment, await environment.reset(task_id)
    finally:
        await environment.close()


async def output(environment: RemoteEnvironment, command: str) -> str:
    return (await environment.step(Action(command=command))).output


async def scored(upstream: Upstream, task_id: str, *commands: str) -> Verdict:
    async with begun(upstream, task_id) as (environment, _):
        for command in ("rm -f answer.txt", *commands):
            await environment.step(Action(command=command))
        return verdict_of(await environment.step(Action(action_type="evaluate")))


async def attempt(upstream: Upstream, *replies: str) -> Episode:
    environment = upstream.factory.create()
    try:
        return await run_episode(
            environment,
            ScriptedPolicy(*replies),
            task_id=SOLVABLE,
            opening=opening("first-steps"),
            limits=Limits(),
            seed=1,
        )
    finally:
        await environment.close()


async def test_a_whole_episode_that_solves_its_task_gets_one(upstream: Upstream) -> None:
    script = f"```bash\nrm -f answer.txt\n{SOLVE}\nexit 3\n```"
    episode = await attempt(upstream, script, "```bash\ncat answer.txt\n```", "TASK_COMPLETE")
    assert (episode.end_reason, episode.error, episode.reward) == (EndReason.TASK_COMPLETE, "", 1.0)
    assert [turn.observation for turn in episode.turns] == ["(no output)\n(exit status 3)", "forty-two", ""]


async def test_a_whole_episode_that_does_nothing_gets_zero(upstream: Upstream) -> None:
    episode = await attempt(upstream, "```bash\nrm -f answer.txt\n```", "TASK_COMPLETE")
    assert (episode.end_reason, episode.error, episode.reward) == (EndReason.TASK_COMPLETE, "", 0.0)
    assert episode.verdict is not None and episode.verdict.cause is Cause.TESTS_FAILED


async def test_tests_that_write_no_reward_give_no_verdict(upstream: Upstream) -> None:
    verdict = await scored(upstream, NO_REWARD, SOLVE)
    assert (verdict.outcome, verdict.reward) == (Outcome.NO_VERDICT, None)
    assert "toolchain" in verdict.output_tail + verdict.detail


async def test_a_reward_that_is_no_number_gives_no_verdict(upstream: Upstream) -> None:
    verdict = await scored(upstream, BAD_REWARD, SOLVE)
    assert (verdict.outcome, verdict.reward) == (Outcome.NO_VERDICT, None)


async def test_tests_that_outlast_their_budget_give_no_verdict(upstream: Upstream) -> None:
    async with begun(upstream, SLOW_TESTS) as (environment, observation):
        started = time.monotonic()
        # older servers do not say what the task's own budget is
        budget_s = None if observation.info["verifier_timeout_sec"] == 2.0 else 2.0
        verdict = verdict_of(await environment.step(Action(action_type="evaluate", wait_seconds=budget_s)))
        assert (verdict.outcome, verdict.reward) == (Outcome.NO_VERDICT, None)
        assert time.monotonic() - started < 20.0


async def test_a_reward_that_the_policy_wrote_is_not_the_verdict(upstream: Upstream) -> None:
    plant = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh"
    verdict = await scored(upstream, NO_REWARD, plant)
    assert verdict.outcome is Outcome.NO_VERDICT


async def test_verdicts_say_whether_the_policy_could_read_the_tests(upstream: Upstream) -> None:
    async with begun(upstream) as (environment, observation):
        places = f"/tests {observation.task_path}/tests /task/tests"
        found = await output(environment, f"for f in {places}; do [ -e $f/test.sh ] && echo found; done")
        verdict = verdict_of(await environment.step(Action(action_type="evaluate")))
        assert verdict.integrity == ("exposed" if "found" in found else "sealed")
        assert verdict.integrity == "sealed" or not upstream.is_ours


async def test_the_instruction_and_budgets_come_from_reset(upstream: Upstream) -> None:
    async with begun(upstream) as (_, observation):
        assert "forty-two" in observation.instruction
        assert observation.task_id == SOLVABLE
        assert observation.info["command_timeout_s"] > 0
        assert observation.info["verifier_timeout_sec"] >= VERIFIER_TIMEOUT_S


async def test_every_command_starts_in_the_workdir(upstream: Upstream) -> None:
    async with begun(upstream) as (environment, _):
        workdir = (await output(environment, "pwd")).strip()
        assert workdir == WORKDIR or upstream.factory.settings.legacy_workdir == ""
        await environment.step(Action(command="cd /; export A=1"))
        assert await output(environment, 'pwd; echo "A=$A"') == f"{workdir}\nA=\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo 'single quoted' \"double $((1 + 1))\" `echo back`", "single quoted double 2 back\n"),
        ("cat <<'EOF'\nit's $HOME\nEOF", "it's $HOME\n"),
        ("[[ abc == a* ]] && echo bash", "bash\n"),
        ("printf 'é漢'", "é漢"),
        ("true", ""),
        ("printf '\\377'", "\N{REPLACEMENT CHARACTER}"),
    ],
)
async def test_commands_arrive_as_they_are(upstream: Upstream, command: str, expected: str) -> None:
    async with begun(upstream) as (environment, _):
        answer = await environment.step(Action(command=command))
        assert (answer.output, answer.error) == (expected, "")


async def test_a_failed_command_is_an_answer(upstream: Upstream) -> None:
    async with begun(upstream) as (environment, _):
        answer = await environment.step(Action(command="ls nowhere"))
        assert "nowhere" in answer.output and answer.error == ""
        assert answer.info["exit_code"] == 2
        assert await output(environment, "echo on") == "on\n"


async def test_a_command_that_outlasts_its_budget_does_not_end_the_session(upstream: Upstream) -> None:
    async with begun(upstream) as (environment, _):
        started = time.monotonic()
        answer = await environment.step(Action(command="echo begun; sleep 4321", wait_seconds=2.0))
        assert (answer.output, answer.info["timed_out"], answer.success) == ("begun\n", True, False)
        assert time.monotonic() - started < 15.0
        # the brackets keep the search from finding itself
        assert await output(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep [4]321'") == "0\n"


async def test_sessions_at_once_get_their_own_answers(upstream: Upstream) -> None:
    async def one(number: int) -> list[str]:
        async with begun(upstream) as (environment, _):
            return [await output(environment, f"sleep 0.{turn}; echo {number}-{turn}") for turn in range(3)]

    said = await asyncio.gather(*(one(number) for number in range(4)))
    assert said == [[f"{number}-{turn}\n" for turn in range(3)] for number in range(4)]


async def test_a_task_that_is_not_there_is_an_error_and_the_session_can_start_another(upstream: Upstream) -> None:
    environment = upstream.factory.create()
    try:
        with pytest.raises((SandboxStartError, TaskError), match="no-such-task"):
            await environment.reset("no-such-task")
        await environment.reset(SOLVABLE)
        assert await output(environment, "echo on") == "on\n"
    finally:
        await environment.close()


async def test_an_episode_after_another_in_one_session_starts_anew(upstream: Upstream) -> None:
    async with begun(upstream) as (environment, _):
        await environment.step(Action(command=SOLVE))
        assert verdict_of(await environment.step(Action(action_type="evaluate"))).outcome is Outcome.PASSED
        await environment.reset(SOLVABLE)
        await environment.step(Action(command="rm -f answer.txt"))
        assert verdict_of(await environment.step(Action(action_type="evaluate"))).outcome is Outcome.FAILED
