"""Whole episodes on the older and the newer upstream, played by openenv's own server classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection

from termrl.agent.episode import run_episode
from termrl.agent.prompts import opening
from termrl.agent.types import Episode, Limits, Policy
from termrl.environment.protocol import Action, Environment
from termrl.environment.remote import RemoteEnvironmentFactory
from termrl.environment.remote_config import RemoteSettings
from termrl.errors import CapacityError, ConfigError, EnvironmentLostError, SandboxStartError
from termrl.verifier.verdict import Cause, EndReason, Finding, Verdict
from tests.agent.fakes import ScriptedPolicy
from tests.environment.client.conftest import answering, error, misbehaving, observation, polite
from tests.environment.upstreams import HARNESS, echo_app, hosted, newer_app, older_app
from tests.verifier.tiny import SECRET

DONE = "TASK_COMPLETE"
EVALUATE = Action(action_type="evaluate")
EXPOSED = RemoteSettings(allow_exposed_tests=True, capacity_wait_s=10)
SEALED = RemoteSettings(capacity_wait_s=10)


def bash(command: str) -> str:
    return f"```bash\n{command}\n```"


SOLVE = bash(f"echo '{SECRET}' > answer.txt")


async def attempt(url: str, policy: Policy, task: str = "tiny", settings: RemoteSettings = SEALED) -> Episode:
    environment = RemoteEnvironmentFactory(url, settings=settings).create()
    try:
        return await run_episode(
            environment,
            policy,
            task_id=task,
            opening=opening("first-steps"),
            limits=Limits(max_turns=5, command_timeout_s=5.0),
            seed=1,
        )
    finally:
        await environment.close()


@asynccontextmanager
async def session(url: str, task: str = "tiny", settings: RemoteSettings = EXPOSED) -> AsyncIterator[Environment]:
    environment = RemoteEnvironmentFactory(url, settings=settings).create()
    try:
        await environment.reset(task)
        yield environment
    finally:
        await environment.close()


async def verdict_in(environment: Environment) -> Verdict:
    return Verdict.model_validate((await environment.step(EVALUATE)).info["verdict"])


# --- a server that scores by test.sh


async def test_a_newer_servers_own_verdict_is_used(tasks: Path) -> None:
    async with hosted(newer_app(tasks)) as url:
        passed = await attempt(url, ScriptedPolicy(SOLVE, DONE))
        failed = await attempt(url, ScriptedPolicy(DONE))
    assert (passed.end_reason, passed.reward, failed.reward) == (EndReason.TASK_COMPLETE, 1.0, 0.0)
    assert passed.instruction == "Write the answer to answer.txt."
    assert passed.verdict is not None and passed.verdict.integrity == "sealed"
    assert failed.verdict is not None and failed.verdict.cause is Cause.TESTS_FAILED


async def test_a_policy_that_breaks_the_tests_gets_zero_and_not_nothing(tasks: Path) -> None:
    async with hosted(newer_app(tasks, max_sessions=1)) as url:
        episode = await attempt(url, ScriptedPolicy(bash("rm settings.sh"), DONE), "fragile")
    assert (episode.reward, episode.verdict and episode.verdict.cause) == (0.0, Cause.BROKE_VERIFIER)
    assert episode.verdict is not None and episode.verdict.attribution is not None
    assert episode.verdict.attribution.finding is Finding.UNTOUCHED_SCORED


async def test_a_task_whose_tests_never_score_is_no_zero(tasks: Path) -> None:
    async with hosted(newer_app(tasks, max_sessions=1)) as url:
        episode = await attempt(url, ScriptedPolicy(DONE), "crash")
    assert (episode.reward, episode.verdict and episode.verdict.cause) == (None, Cause.VERIFIER_CRASH)
    assert episode.verdict is not None and episode.verdict.attribution is not None
    assert episode.verdict.attribution.finding is Finding.UNTOUCHED_SILENT


async def test_a_fault_of_the_server_while_it_scores_is_no_zero(tasks: Path) -> None:
    async with hosted(newer_app(tasks, breaks=1, counts={})) as url:
        episode = await attempt(url, ScriptedPolicy(SOLVE, DONE))
    assert episode.reward == 1.0, "the second run in the same session counts"


async def test_a_container_that_died_is_the_infrastructures_and_is_not_attributed(tasks: Path) -> None:
    async with hosted(newer_app(tasks, loses=1, counts={})) as url:
        episode = await attempt(url, ScriptedPolicy(DONE))
    assert (episode.reward, episode.verdict and episode.verdict.cause) == (None, Cause.SANDBOX_LOST)


async def test_dropping_missing_verdicts_asks_nobody(tasks: Path) -> None:
    counts: dict[str, int] = {}
    settings = RemoteSettings(missing_verdict="drop")
    async with hosted(newer_app(tasks, counts=counts)) as url:
        episode = await attempt(url, ScriptedPolicy(bash("rm settings.sh"), DONE), "fragile", settings)
    assert (episode.reward, counts["evaluates"]) == (None, 1)


async def test_what_another_harness_scored_is_no_verdict_and_nobodys_zero(tasks: Path) -> None:
    counts: dict[str, int] = {}
    async with hosted(newer_app(tasks, harness="pytest", counts=counts)) as url:
        episode = await attempt(url, ScriptedPolicy(DONE))
    assert (episode.reward, episode.verdict and episode.verdict.cause) == (None, Cause.ENVIRONMENT_LOST)
    assert counts["evaluates"] == 1
    assert "pytest" in (episode.verdict.detail if episode.verdict else "")


async def test_a_newer_server_that_leaves_the_tests_readable_is_refused_and_else_marked(tasks: Path) -> None:
    async with hosted(newer_app(tasks, exposed=True)) as url:
        with pytest.raises(ConfigError, match="read this server's tests") as caught:
            await attempt(url, ScriptedPolicy(DONE))
        assert "--allow-exposed-tests" in (caught.value.hint or "")
        episode = await attempt(url, ScriptedPolicy(SOLVE, DONE), settings=EXPOSED)
    assert episode.verdict is not None and (episode.reward, episode.verdict.integrity) == (1.0, "exposed")


# --- a server that does not: the adapter


async def test_an_older_server_is_scored_by_the_tasks_tests_and_marked(tasks: Path) -> None:
    async with hosted(older_app(tasks)) as url:
        passed = await attempt(url, ScriptedPolicy(SOLVE, DONE), settings=EXPOSED)
        failed = await attempt(url, ScriptedPolicy(DONE), settings=EXPOSED)
    assert (passed.reward, failed.reward) == (1.0, 0.0)
    assert passed.verdict is not None and (passed.verdict.integrity, passed.verdict.exit_code) == ("exposed", 0)
    assert passed.info["reset"]["verifier_timeout_sec"] == 900
    assert failed.verdict is not None and failed.verdict.output_tail == "answer.txt does not hold the answer\n"


async def test_an_older_server_is_refused_unless_exposed_tests_are_allowed(tasks: Path) -> None:
    async with hosted(older_app(tasks)) as url:
        with pytest.raises(ConfigError, match="read this server's tests") as caught:
            await attempt(url, ScriptedPolicy(DONE))
    assert "allow_exposed_tests" in (caught.value.hint or "")


COMMANDS = {
    "pwd": ("pwd", "/app\n", 0),
    "quotes": ("echo 'a  b' \"c  d\" | sed 's/b/x/'", "a  x c  d\n", 0),
    "here-document": ("cat <<'E'\n$HOME 'q'\nE", "$HOME 'q'\n", 0),
    "exit code": ("echo x; exit 7", "x\n", 7),
    "a later command after a failing one": ("false; pwd", "/app\n", 0),
    "killed": ("kill -9 $$", "", 137),
    "no newline at the end": ("printf x", "x", 0),
    "bytes that are no text": ("printf 'a\\377b'", "a�b", 0),
    "errors": ("echo oops >&2", "oops\n", 0),
    "stdin is empty": ("cat; echo read", "read\n", 0),
    "a child that keeps stdout": ("sleep 30 & echo started", "started\n", 0),
}


@pytest.mark.parametrize(("command", "output", "exit_code"), COMMANDS.values(), ids=COMMANDS.keys())
async def test_commands_on_an_older_server_run_as_on_ours(
    older: str, command: str, output: str, exit_code: int
) -> None:
    async with session(older) as environment:
        observation = await environment.step(Action(command=command))
    assert (observation.output, observation.info["exit_code"]) == (output, exit_code)
    assert observation.success and not observation.error


@pytest.fixture
async def older(tasks: Path) -> AsyncIterator[str]:
    async with hosted(older_app(tasks)) as url:
        yield url


async def test_a_command_on_an_older_server_is_bounded_in_time_and_output(older: str) -> None:
    async with session(older) as environment:
        slow = await environment.step(Action(command="echo begun; sleep 60", wait_seconds=1))
        loud = await environment.step(Action(command="head -c 300000 /dev/zero | tr '\\0' y"))
        after = await environment.step(Action(command="pwd"))
    assert (slow.output, slow.info["timed_out"], slow.success) == ("begun\n", True, False)
    assert "timed out after 1 s" in slow.error
    assert len(loud.output) < 70_000 and loud.info["truncated_bytes"] > 200_000
    assert after.output == "/app\n"


async def test_a_command_that_the_server_cuts_off_is_said_so(tasks: Path) -> None:
    async with hosted(older_app(tasks, exec_cap_s=0.5)) as url, session(url) as environment:
        observation = await environment.step(Action(command="sleep 5", wait_seconds=20))
    assert not observation.success and "cut off by the environment server" in observation.error


async def test_a_command_too_long_for_an_older_server_is_an_answer_to_the_policy(older: str) -> None:
    episode = await attempt(older, ScriptedPolicy(bash("echo " + "x" * 150_000), SOLVE, DONE), settings=EXPOSED)
    assert "too long" in episode.turns[0].observation
    assert episode.reward == 1.0


async def test_without_a_workdir_commands_run_where_the_server_runs_them(older: str) -> None:
    settings = EXPOSED.model_copy(update={"legacy_workdir": ""})
    async with session(older, settings=settings) as environment:
        assert (await environment.step(Action(command="pwd"))).output == "/task\n"


@pytest.mark.parametrize(
    ("update", "says"),
    [({"legacy_workdir": "/nowhere"}, "in /nowhere"), ({"legacy_tests_src": "/nowhere"}, "no test.sh in /nowhere")],
)
async def test_a_workdir_or_tests_that_are_not_there_stop_at_the_first_reset(
    older: str, update: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        await attempt(older, ScriptedPolicy(DONE), settings=EXPOSED.model_copy(update=update))
    assert "legacy_" in (caught.value.hint or "")


PLANTED = {
    "a reward": "mkdir -p /logs/verifier; cd /logs/verifier; echo 1 > reward.txt; echo 1 > reward.json",
    "a reward behind a link": "mkdir -p /logs/verifier; echo 1 > r; ln -s /app/r /logs/verifier/reward.txt",
    "tests": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "marker lines": "echo 'termrl-0 exit 0'; echo 'termrl-0 reward.txt MQo='",
}


@pytest.mark.parametrize("command", PLANTED.values(), ids=PLANTED.keys())
async def test_what_was_planted_for_the_adapter_scores_nothing(older: str, command: str) -> None:
    async with session(older) as environment:
        await environment.step(Action(command=command))
        assert (await verdict_in(environment)).reward == 0.0


async def test_a_stale_reward_does_not_stand_in_for_one_that_the_tests_did_not_write(older: str) -> None:
    async with session(older, "crash") as environment:
        await environment.step(Action(command=PLANTED["a reward"]))
        verdict = await verdict_in(environment)
    assert (verdict.reward, verdict.cause, verdict.exit_code) == (None, Cause.VERIFIER_CRASH, 1)


async def test_a_reward_that_is_none_is_no_verdict_on_an_older_server(older: str) -> None:
    async with session(older, "bad") as environment:
        verdict = await verdict_in(environment)
    assert (verdict.reward, verdict.cause) == (None, Cause.BAD_REWARD)


@pytest.mark.parametrize("command", ["rm settings.sh", "rm -rf /task/tests"])
async def test_a_policy_that_breaks_the_adapters_scoring_gets_zero(older: str, command: str) -> None:
    async with session(older, "fragile") as environment:
        await environment.step(Action(command=command))
        verdict = await verdict_in(environment)
    assert (verdict.reward, verdict.cause, verdict.integrity) == (0.0, Cause.BROKE_VERIFIER, "exposed")


async def test_scoring_that_the_server_cuts_off_is_no_verdict(tasks: Path) -> None:
    (tasks / "crash/tests/test.sh").write_text("sleep 5; echo 1 > /logs/verifier/reward.txt")
    settings = EXPOSED.model_copy(update={"missing_verdict": "drop"})
    async with hosted(older_app(tasks, exec_cap_s=0.7)) as url, session(url, "crash", settings) as environment:
        verdict = await verdict_in(environment)
    assert verdict.reward is None and "cut the scoring off" in verdict.detail


async def test_tests_beyond_their_budget_are_no_verdict_on_an_older_server(tasks: Path) -> None:
    (tasks / "crash/tests/test.sh").write_text("echo begun; sleep 30; echo 1 > /logs/verifier/reward.txt")
    settings = EXPOSED.model_copy(update={"missing_verdict": "drop"})
    async with hosted(older_app(tasks)) as url, session(url, "crash", settings) as environment:
        answer = await environment.step(Action(action_type="evaluate", wait_seconds=1))
    verdict = Verdict.model_validate(answer.info["verdict"])
    assert (verdict.reward, verdict.cause, verdict.output_tail[:5]) == (None, Cause.VERIFIER_TIMEOUT, "begun")


@pytest.mark.parametrize(("fidelity", "reward"), [("adapter", 1.0), ("server", None)])
async def test_fidelity_can_be_said(older: str, fidelity: str, reward: float | None) -> None:
    settings = RemoteSettings.model_validate({"fidelity": fidelity, "allow_exposed_tests": True})
    episode = await attempt(older, ScriptedPolicy(bash(f"echo {SECRET} > /app/answer.txt"), DONE), settings=settings)
    assert episode.reward == reward


# --- sessions that are lost, full, or never begin


@asynccontextmanager
async def dying(on: Callable[[dict[str, Any]], bool]) -> AsyncIterator[str]:
    async def script(connection: ServerConnection) -> None:
        async def answer(message: dict[str, Any]) -> str | None:
            if on(message):
                connection.transport.abort()
                return None
            if message["type"] == "reset":
                info = {"verifier_timeout_sec": 5, "command_timeout_s": 5, "agent_timeout_sec": None}
                return observation(instruction="Do it.", action_type="reset", info=info)
            return await polite(message)

        await answering(connection, answer)

    async with misbehaving(script) as url:
        yield url


async def test_a_connection_lost_in_mid_episode_is_no_zero() -> None:
    async with dying(lambda m: m["type"] == "step") as url:
        episode = await attempt(url, ScriptedPolicy(SOLVE, DONE))
    assert (episode.end_reason, episode.reward) == (EndReason.ENVIRONMENT_ERROR, None)
    assert episode.verdict is not None and episode.verdict.cause is Cause.ENVIRONMENT_LOST


@pytest.mark.parametrize("kind", ["reset", "evaluate"])
async def test_a_connection_lost_at_the_beginning_or_the_end_is_no_zero(kind: str) -> None:
    async with dying(lambda m: kind in (m["type"], m["data"].get("action_type"))) as url:
        episode = await attempt(url, ScriptedPolicy(SOLVE, DONE))
    assert episode.reward is None
    assert episode.verdict is not None and episode.verdict.cause is Cause.ENVIRONMENT_LOST


async def test_after_a_loss_nothing_is_answered_until_a_reset_opens_a_new_session() -> None:
    died = 0

    def once(message: dict[str, Any]) -> bool:
        nonlocal died
        died += message["type"] == "step" and message["data"]["command"] == "die"
        return died == 1 and message["type"] == "step"

    async with dying(once) as url, session(url) as environment:
        for command in ("die", "ls", "ls"):
            with pytest.raises(EnvironmentLostError):
                await environment.step(Action(command=command))
        await environment.reset("tiny")
        died = 2
        assert (await environment.step(Action(command="ls"))).output == "ls"


async def test_waiting_for_a_slot_does_not_count_against_the_episode(tasks: Path) -> None:
    async with hosted(newer_app(tasks, max_sessions=1)) as url:
        async with session(url):
            waiting = asyncio.create_task(attempt(url, ScriptedPolicy(SOLVE, DONE)))
            await asyncio.sleep(0.7)
        episode = await waiting
    assert episode.reward == 1.0
    assert episode.timings["admission_s"] >= 0.6 > episode.timings["reset_s"]


async def test_no_slot_in_time_is_the_cause_capacity(tasks: Path) -> None:
    async with hosted(newer_app(tasks, max_sessions=1)) as url, session(url):
        episode = await attempt(url, ScriptedPolicy(DONE), settings=RemoteSettings(capacity_wait_s=0.3))
    assert (episode.end_reason, episode.reward) == (EndReason.ENVIRONMENT_ERROR, None)
    assert episode.verdict is not None and episode.verdict.cause is Cause.CAPACITY
    assert episode.timings["admission_s"] >= 0.3 > episode.timings["reset_s"]


async def test_a_reset_that_failed_leaves_no_episode_to_be_scored(tasks: Path) -> None:
    async with hosted(newer_app(tasks)) as url, session(url) as environment:
        await environment.step(Action(command=f"echo {SECRET} > answer.txt"))
        with pytest.raises(SandboxStartError, match="no-such-task"):
            await environment.reset("no-such-task")
        answer = await environment.step(EVALUATE)
        assert (answer.reward, answer.done, answer.success) == (None, False, False)
        assert "reset failed" in answer.error
        await environment.reset("tiny")
        assert (await verdict_in(environment)).reward == 0.0


async def test_ten_resets_in_one_session_see_nothing_of_each_other(tasks: Path) -> None:
    async with hosted(newer_app(tasks, max_sessions=1)) as url, session(url) as environment:
        for _ in range(10):
            await environment.reset("tiny")
            assert (await environment.step(Action(command="ls"))).output == "settings.sh\n"
            await environment.step(Action(command="touch mine"))
        assert (await verdict_in(environment)).reward == 0.0


async def test_steps_without_an_episode_are_refused_here(tasks: Path) -> None:
    async with hosted(newer_app(tasks)) as url:
        environment = RemoteEnvironmentFactory(url).create()
        assert "reset comes first" in (await environment.step(Action(command="ls"))).error
        await environment.reset("tiny")
        assert environment.state().terminal_ready and environment.state().task_id == "tiny"
        assert (await environment.step(EVALUATE)).done
        after = await environment.step(Action(command="ls"))
        assert (after.success, after.done) == (False, True)
        assert (await environment.step(Action(action_type="close"))).done
        assert not environment.state().terminal_ready
        await environment.close()


async def test_another_kind_of_environment_is_refused_at_the_first_reset() -> None:
    async with hosted(echo_app()) as url:
        episode = await attempt(url, ScriptedPolicy(DONE), settings=EXPOSED)
    assert (episode.end_reason, episode.reward) == (EndReason.ENVIRONMENT_ERROR, None)


# --- verdicts that contradict themselves

WHOLE = Verdict.scored(1.0).model_dump(mode="json")
FAILED = Verdict.scored(0.0).model_dump(mode="json")
MISSING = Verdict.missing(Cause.VERIFIER_CRASH, "boom").model_dump(mode="json")
WRONG = {
    "a pass beside reward 0": (0.0, {"verdict": WHOLE}),
    "a failure beside reward 1": (1.0, {"verdict": FAILED}),
    "a verdict beside no reward": (None, {"verdict": WHOLE}),
    "a reward beside no verdict": (0.0, {"verdict": MISSING}),
    "a zero for the infrastructure": (0.0, {"verdict": {"outcome": "failed", "cause": "sandbox_lost"}}),
    "a cause that is not known": (0.0, {"verdict": {"outcome": "failed", "cause": "bad_mood"}}),
    "no object": (0.0, {"verdict": "failed"}),
    "no verdict at all": (0.0, {"harness": HARNESS}),
    "another harness": (1.0, {"verdict": {**WHOLE, "harness": "pytest"}}),
}


@asynccontextmanager
async def judging(reward: float | None, info: dict[str, Any], **fields: Any) -> AsyncIterator[str]:
    async def answer(message: dict[str, Any]) -> str | None:
        if message["type"] == "reset":
            told = {"agent_timeout_sec": 60, "verifier_timeout_sec": 5, "command_timeout_s": 5}
            return observation(instruction="Do it.", action_type="reset", info=told)
        return observation(action_type="evaluate", reward=reward, info=info, done=reward is not None, **fields)

    async with misbehaving(lambda c: answering(c, answer)) as url:
        yield url


@pytest.mark.parametrize(("reward", "info"), WRONG.values(), ids=WRONG.keys())
async def test_a_verdict_that_contradicts_itself_is_none_and_never_a_zero(
    reward: float | None, info: dict[str, Any]
) -> None:
    async with judging(reward, info) as url:
        episode = await attempt(url, ScriptedPolicy(DONE))
    assert (episode.reward, episode.verdict and episode.verdict.cause) == (None, Cause.ENVIRONMENT_LOST)


@pytest.mark.parametrize("verdict", [{"outcome": "passed"}, {**WHOLE, "signals": 5, "attribution": {"finding": "?"}}])
async def test_evidence_that_is_missing_or_unreadable_costs_no_verdict(verdict: dict[str, Any]) -> None:
    reward = verdict.get("raw_reward", 1.0)
    async with judging(reward, {"verdict": verdict}) as url:
        assert (await attempt(url, ScriptedPolicy(DONE))).reward == 1.0


async def test_an_error_of_the_server_with_a_cause_keeps_it() -> None:
    async def answer(message: dict[str, Any]) -> str | None:
        if message["type"] == "reset":
            return error("EXECUTION_ERROR", "no such image", cause="image_unavailable", hint="docker pull it")
        return None

    async with misbehaving(lambda c: answering(c, answer)) as url:
        episode = await attempt(url, ScriptedPolicy(DONE))
        with pytest.raises(SandboxStartError) as caught:
            await RemoteEnvironmentFactory(url).fresh("tiny")
    assert episode.verdict is not None and episode.verdict.cause is Cause.IMAGE_UNAVAILABLE
    assert caught.value.hint == "docker pull it" and not isinstance(caught.value, CapacityError)


@pytest.mark.parametrize(
    "field", [{"legacy_workdir": "app"}, {"legacy_workdir": "/a b"}, {"legacy_tests_src": "/t;rm"}]
)
def test_folders_that_a_shell_would_read_otherwise_are_refused(field: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="pattern"):
        RemoteSettings.model_validate(field)
