"""The environment in this process, over real sandboxes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrl.environment.protocol import Action, Observation
from termrl.environment.terminal import LocalEnvironmentFactory, TerminalEnvironment
from termrl.errors import SandboxError, TaskError
from termrl.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from termrl.tasks.task import Task
from termrl.verifier.rules import VerifyRules
from termrl.verifier.verdict import Cause, Finding, Outcome, Verdict
from tests.verifier.tiny import SECRET, tiny_task

EVALUATE = Action(action_type="evaluate")

FRAGILE = """\
set -e
. ./settings.sh
while [ -e hang ]; do sleep 0.05; done
[ "$(cat answer.txt 2>/dev/null)" = forty-two-5f1c ] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
"""


class WatchedProvider(SandboxProvider):
    """A real provider that records what it made and how many were up at once."""

    name = "watched"

    def __init__(self, inner: SandboxProvider) -> None:
        self.inner = inner
        self.made: list[Sandbox] = []
        self.peak = 0

    def refusal(self, spec: SandboxSpec) -> str | None:
        return self.inner.refusal(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self.inner.create(spec)
        self.made.append(sandbox)
        self.peak = max(self.peak, self.live)
        return sandbox

    async def close(self) -> None:
        await self.inner.close()

    @property
    def live(self) -> int:
        return self.inner.live


@pytest.fixture
def watched(provider: SandboxProvider) -> WatchedProvider:
    return WatchedProvider(provider)


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, Task]:
    made = [
        tiny_task(tmp_path, files={"note.txt": "hello\n"}),
        tiny_task(tmp_path, id="fragile", test=FRAGILE, files={"settings.sh": "x=1\n"}, verifier_timeout_s=1.0),
        tiny_task(tmp_path, id="silent", test="exit 1"),
        tiny_task(tmp_path, id="half", test="echo 0.5 > /logs/verifier/reward.txt"),
        tiny_task(tmp_path, id="online", test=FRAGILE, files={"settings.sh": "x=1\n"}, tests_use_network=True),
        tiny_task(tmp_path, id="image", spec={"image": "python:3.13"}, agent_timeout_s=None),
        tiny_task(tmp_path, id="public", spec={"network_mode": "public"}),
        tiny_task(tmp_path, id="token", verifier_env={"TOKEN": "${TERMRL_TEST_NOT_SET}"}),
    ]
    return {task.id: task for task in made}


@pytest.fixture
async def environment(watched: WatchedProvider, tasks: dict[str, Task]) -> AsyncIterator[TerminalEnvironment]:
    environment = TerminalEnvironment(tasks, watched)
    yield environment
    await environment.close()
    assert watched.live == 0


async def do(environment: TerminalEnvironment, command: str, **fields: object) -> Observation:
    return await environment.step(Action.model_validate({"command": command, **fields}))


def verdict_in(observation: Observation) -> Verdict:
    return Verdict.model_validate(observation.info["verdict"])


async def test_reset_tells_the_instruction_and_the_budgets(
    environment: TerminalEnvironment, tasks: dict[str, Task]
) -> None:
    observation = await environment.reset("tiny", seed=1, episode_id="e-1")
    assert observation.instruction == "Write the answer to answer.txt."
    assert observation.info == {
        "command_timeout_s": 20.0,
        "verifier_timeout_sec": 20.0,
        "agent_timeout_sec": 60.0,
        "docker_image": None,
        "workdir": "/app",
    }
    assert (observation.task_id, observation.reward, observation.done, observation.action_type) == (
        "tiny",
        0.0,
        False,
        "reset",
    )
    state = environment.state()
    assert (state.episode_id, state.step_count, state.task_id, state.terminal_ready) == ("e-1", 0, "tiny", True)


async def test_a_command_sees_the_tasks_files_and_its_exit_code_comes_back(environment: TerminalEnvironment) -> None:
    await environment.reset("tiny")
    observation = await do(environment, "pwd; cat note.txt; echo oops >&2; exit 7")
    assert observation.output == "/app\nhello\noops\n"
    assert (observation.success, observation.error, observation.reward, observation.done) == (True, "", 0.0, False)
    assert observation.info["exit_code"] == 7
    assert {"timed_out", "truncated_bytes", "duration_s", "background"} <= set(observation.info)
    state = environment.state()
    assert (state.step_count, state.last_action_type) == (1, "exec")
    assert state.last_command.startswith("pwd") and state.last_output == observation.output


async def test_a_command_that_times_out_says_so_and_keeps_its_output(environment: TerminalEnvironment) -> None:
    await environment.reset("tiny")
    observation = await do(environment, "echo before; sleep 60", wait_seconds=0.5)
    assert observation.output == "before\n"
    assert not observation.success and "timed out after 0.5 s" in observation.error
    assert observation.info["timed_out"] and observation.info["exit_code"] is None
    assert (await do(environment, "echo alive")).output == "alive\n"


async def test_a_command_that_can_never_run_is_an_observation(environment: TerminalEnvironment) -> None:
    await environment.reset("tiny")
    observation = await do(environment, "echo a\0b")
    assert not observation.success and "NUL" in observation.error
    assert (observation.reward, observation.done) == (0.0, False)
    assert (await do(environment, "echo alive")).success


@pytest.mark.parametrize("task_id", ["../../etc", "/etc", "", "tiny/", "./tiny", "tini"])
async def test_only_the_sets_own_names_are_tasks(environment: TerminalEnvironment, task_id: str) -> None:
    with pytest.raises(TaskError) as caught:
        await environment.reset(task_id)
    assert "there is no task" in caught.value.message and caught.value.hint
    if task_id == "tini":
        assert "'tiny'" in caught.value.hint


async def test_evaluate_after_a_failed_reset_fails_closed(
    environment: TerminalEnvironment, watched: WatchedProvider
) -> None:
    await environment.reset("tiny")
    await do(environment, f"echo {SECRET} > answer.txt")
    with pytest.raises(TaskError):
        await environment.reset("nowhere")
    assert watched.live == 0
    observation = await environment.step(EVALUATE)
    assert (observation.reward, observation.success, observation.done) == (None, False, False)
    assert "reset failed" in observation.error
    assert verdict_in(observation).outcome is Outcome.NO_VERDICT
    assert not (await do(environment, "true")).success
    await environment.reset("tiny")
    assert (await environment.step(EVALUATE)).reward == 0.0


async def test_a_task_that_the_backend_refuses_leaves_no_episode(environment: TerminalEnvironment) -> None:
    with pytest.raises(TaskError, match="network"):
        await environment.reset("public")
    assert (await environment.step(EVALUATE)).reward is None


async def test_a_task_without_a_limit_and_with_an_image_says_so(environment: TerminalEnvironment) -> None:
    info = (await environment.reset("image")).info
    assert (info["docker_image"], info["agent_timeout_sec"]) == ("python:3.13", None)


async def test_a_missing_host_variable_of_the_verifier_fails_the_reset(
    environment: TerminalEnvironment, watched: WatchedProvider
) -> None:
    with pytest.raises(TaskError, match="TERMRL_TEST_NOT_SET"):
        await environment.reset("token")
    assert watched.made == []


async def test_a_step_before_reset_and_after_done_is_an_error(environment: TerminalEnvironment) -> None:
    assert "reset comes first" in (await do(environment, "true")).error
    assert (await environment.step(EVALUATE)).reward is None
    await environment.reset("tiny")
    assert (await environment.step(EVALUATE)).done
    observation = await do(environment, f"echo {SECRET} > answer.txt")
    assert not observation.success and "done" in observation.error and observation.done
    again = await environment.step(EVALUATE)
    assert again.reward is None and "done" in again.error


@pytest.mark.parametrize(("command", "reward"), [(f"echo {SECRET} > answer.txt", 1.0), ("true", 0.0)])
async def test_evaluate_gives_the_tests_word(environment: TerminalEnvironment, command: str, reward: float) -> None:
    await environment.reset("tiny")
    await do(environment, command)
    observation = await environment.step(EVALUATE)
    assert (observation.reward, observation.done, observation.success, observation.error) == (reward, True, True, "")
    assert observation.info["tests_passed"] is (reward == 1.0)
    assert observation.info["harness"] == "tests/test.sh"
    assert verdict_in(observation).reward == reward


async def test_a_fraction_goes_over_the_wire_raw_and_is_not_a_pass(environment: TerminalEnvironment) -> None:
    await environment.reset("half")
    observation = await environment.step(EVALUATE)
    assert (observation.reward, observation.info["tests_passed"], observation.done) == (0.5, False, True)


async def test_ten_resets_in_one_session_leak_nothing_and_see_nothing_of_each_other(
    environment: TerminalEnvironment, watched: WatchedProvider
) -> None:
    for n in range(10):
        await environment.reset("tiny")
        observation = await do(environment, "cat mark /tmp/mark; pgrep -c sleep; true")
        assert "old" not in observation.output and "1" not in observation.output.splitlines()
        await do(environment, "echo old > mark; echo old > /tmp/mark; setsid sleep 985 & exec 1>&-")
        assert watched.live == 1 and environment.state().step_count == 2, n
    assert watched.peak == 1


async def test_close_is_idempotent_and_a_closed_session_can_be_reset(
    environment: TerminalEnvironment, watched: WatchedProvider
) -> None:
    await environment.reset("tiny")
    observation = await environment.step(Action(action_type="close"))
    assert observation.done and observation.success and watched.live == 0
    await environment.close()
    await environment.close()
    assert "closed" in (await do(environment, "true")).error
    await environment.reset("tiny")
    assert (await do(environment, "echo hi")).output == "hi\n"


async def test_a_lost_sandbox_is_an_error_for_a_command_and_a_missing_verdict_for_evaluate(
    environment: TerminalEnvironment, watched: WatchedProvider
) -> None:
    await environment.reset("tiny")
    await watched.made[-1].stop()
    with pytest.raises(SandboxError):
        await do(environment, "true")
    observation = await environment.step(EVALUATE)
    assert observation.reward is None and verdict_in(observation).cause is Cause.SANDBOX_LOST
    assert len(watched.made) == 1


# --- write_file ---------------------------------------------------------------------------------------------------


async def test_write_file_writes_below_the_workdir_or_anywhere_absolute(environment: TerminalEnvironment) -> None:
    await environment.reset("tiny")
    for path in ("sub/dir/a b.txt", "/tmp/c.txt"):
        observation = await environment.step(Action(action_type="write_file", file_path=path, content="ü\n$HOME\n"))
        assert observation.success, observation.error
    assert (await do(environment, "cat 'sub/dir/a b.txt' /tmp/c.txt")).output == "ü\n$HOME\n" * 2


@pytest.mark.parametrize("path", ["", "a\0b", "/proc/1/mem", "."])
async def test_a_file_that_cannot_be_written_is_an_observation(environment: TerminalEnvironment, path: str) -> None:
    await environment.reset("tiny")
    observation = await environment.step(Action(action_type="write_file", file_path=path, content="x"))
    assert not observation.success and observation.error
    assert (await do(environment, "echo alive")).output == "alive\n"


# --- background sessions ------------------------------------------------------------------------------------------


async def test_a_background_session_is_written_to_viewed_waited_for_and_killed(
    environment: TerminalEnvironment,
) -> None:
    await environment.reset("tiny")
    loop = 'echo ready; while read -r line; do [ "$line" = bye ] && exit 5; echo "got $line"; done'
    started = await do(environment, loop, block=False, session_id="talk")
    assert started.success and started.session_id == "talk" and started.info["running"]
    said = started.output
    observation = await environment.step(Action(action_type="write", session_id="talk", command="one $HOME"))
    said += observation.output
    observation = await environment.step(Action(action_type="view", session_id="talk"))
    said += observation.output
    assert said == "ready\ngot one $HOME\n" and observation.info["running"]
    assert (await environment.step(Action(action_type="view", session_id="talk"))).output == ""
    await environment.step(Action(action_type="write", session_id="talk", command="bye"))
    observation = await environment.step(Action(action_type="wait", session_id="talk", wait_seconds=5))
    assert (observation.info["running"], observation.info["exit_code"]) == (False, 5)
    assert "ended" in (await environment.step(Action(action_type="write", session_id="talk", command="x"))).error


async def test_wait_returns_at_its_deadline_and_kill_ends_the_whole_group(environment: TerminalEnvironment) -> None:
    await environment.reset("tiny")
    await do(environment, "sleep 984 & sleep 984", block=False, session_id="long")
    started = time.monotonic()
    observation = await environment.step(Action(action_type="wait", session_id="long", wait_seconds=0.3))
    assert 0.3 <= time.monotonic() - started < 2 and observation.info["running"]
    assert (await do(environment, "pgrep -fc '^sleep 984'")).output == "2\n"
    assert (await environment.step(Action(action_type="kill", session_id="long"))).success
    assert (await do(environment, "pgrep -fc '^sleep 984'")).output == "0\n"
    assert "no session" in (await environment.step(Action(action_type="view", session_id="long"))).error


async def test_a_session_does_not_outlive_evaluate_and_its_output_is_bounded(environment: TerminalEnvironment) -> None:
    await environment.reset("tiny")
    flood = f"while :; do echo {SECRET} > /app/answer.txt; sleep 0.3; seq 1 90000; done"
    assert (await do(environment, flood, block=False)).info["running"]
    observation = await environment.step(Action(action_type="wait", session_id="main", wait_seconds=1.0))
    assert len(observation.output) < 80_000 and observation.info["truncated_bytes"] > 300_000
    assert (await do(environment, "rm -f answer.txt")).success
    assert (await environment.step(EVALUATE)).reward == 0.0


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        (Action(action_type="view"), "no session"),
        (Action(action_type="write", session_id="nope", command="x"), "no session"),
        (Action(action_type="kill", session_id="nope"), "no session"),
        (Action(action_type="wait", session_id="nope", wait_seconds=1), "no session"),
        (Action(command="true", block=False, session_id="../up"), "bad session id"),
        (Action(command="true", block=False, session_id="a;b"), "bad session id"),
        (Action(command="tr\0ue", block=False, session_id="a"), "NUL"),
    ],
)
async def test_a_wrong_session_is_an_observation(
    environment: TerminalEnvironment, action: Action, complaint: str
) -> None:
    await environment.reset("tiny")
    observation = await environment.step(action)
    assert not observation.success and complaint in observation.error


async def test_sessions_are_counted_and_an_ended_one_gives_its_name_back(environment: TerminalEnvironment) -> None:
    await environment.reset("tiny")
    assert (await do(environment, "exit 3", block=False, session_id="s0")).info["exit_code"] == 3
    for n in range(1, 16):
        assert (await do(environment, "sleep 982", block=False, session_id=f"s{n}")).success
    assert "already 16" in (await do(environment, "true", block=False, session_id="s16")).error
    assert "still running" in (await do(environment, "true", block=False, session_id="s1")).error
    assert (await do(environment, "echo again", block=False, session_id="s0")).output == "again\n"


# --- attribution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "cause"),
    [("rm settings.sh", Cause.BROKE_VERIFIER), ("touch hang", Cause.VERIFIER_TIMEOUT_BY_POLICY)],
)
async def test_missing_reward_is_attributed_to_the_policy_when_clean_sandboxes_score(
    environment: TerminalEnvironment, watched: WatchedProvider, command: str, cause: Cause
) -> None:
    await environment.reset("fragile")
    await do(environment, command)
    observation = await environment.step(EVALUATE)
    verdict = verdict_in(observation)
    assert (observation.reward, observation.done, verdict.cause, verdict.attempts) == (0.0, True, cause, 4)
    assert verdict.attribution is not None and verdict.attribution.finding is Finding.UNTOUCHED_SCORED
    assert verdict.attribution.extra_runs == 3 and verdict.attribution.seconds > 0
    assert len(watched.made) == 3, "the episode's own and two untouched ones"
    assert watched.peak == 1, "the episode's sandbox is released before an untouched one is taken"
    assert watched.live == 0


async def test_a_task_whose_tests_say_nothing_anywhere_costs_nobody_a_zero(
    environment: TerminalEnvironment, watched: WatchedProvider
) -> None:
    await environment.reset("silent")
    observation = await environment.step(EVALUATE)
    assert (observation.reward, observation.success, observation.done) == (None, False, False)
    assert observation.error.startswith("no verdict: verifier_crash")
    assert observation.info["tests_passed"] is None
    verdict = verdict_in(observation)
    assert verdict.attribution is not None and verdict.attribution.finding is Finding.UNTOUCHED_SILENT
    assert "reset" in (await do(environment, "true")).error
    assert len(watched.made) == 2


@pytest.mark.parametrize("case", ["setting", "tests use the network"])
async def test_a_dropped_missing_verdict_takes_no_other_sandbox(
    watched: WatchedProvider, tasks: dict[str, Task], case: str
) -> None:
    drop = case == "setting"
    factory = LocalEnvironmentFactory(
        tasks, watched, rules=VerifyRules(missing_verdict="drop" if drop else "attribute")
    )
    environment = factory.create()
    await environment.reset("fragile" if drop else "online")
    await environment.step(Action(command="rm settings.sh"))
    observation = await environment.step(EVALUATE)
    verdict = verdict_in(observation)
    assert observation.reward is None and verdict.cause is Cause.VERIFIER_CRASH
    assert verdict.attribution is not None and verdict.attribution.finding is Finding.DROPPED
    assert len(watched.made) == 1
    await environment.close()


async def test_the_factorys_fresh_environment_is_reset_and_untouched(
    watched: WatchedProvider, tasks: dict[str, Task]
) -> None:
    factory = LocalEnvironmentFactory(tasks, watched)
    used = factory.create()
    await used.reset("fragile")
    await used.step(Action(command=f"rm settings.sh; echo {SECRET} > answer.txt"))
    fresh = await factory.fresh("fragile")
    assert (await fresh.step(Action(command="ls"))).output == "settings.sh\n"
    assert (await fresh.step(EVALUATE)).reward == 0.0
    await fresh.close()
    assert (await used.step(EVALUATE)).reward == 0.0
    await used.close()
    assert watched.live == 0 and watched.peak == 2


async def test_many_sessions_see_only_their_own(watched: WatchedProvider, tasks: dict[str, Task]) -> None:
    import asyncio

    factory = LocalEnvironmentFactory(tasks, watched)

    async def one(n: int) -> tuple[str, float | None]:
        environment = factory.create()
        try:
            await environment.reset("tiny")
            await environment.step(Action(command=f"echo {SECRET if n % 2 else n} > answer.txt"))
            seen = (await environment.step(Action(command="cat answer.txt"))).output.strip()
            return seen, (await environment.step(EVALUATE)).reward
        finally:
            await environment.close()

    found = await asyncio.gather(*(one(n) for n in range(12)))
    assert found == [(SECRET, 1.0) if n % 2 else (str(n), 0.0) for n in range(12)]
    assert watched.live == 0
