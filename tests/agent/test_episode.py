"""The episode loop: what ends it, what is run, what is scored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from termrl.agent.episode import run_episode, turn_seed
from termrl.agent.prompts import opening
from termrl.agent.types import Episode, Limits, Opening, Policy
from termrl.environment.protocol import Observation
from termrl.errors import CommandError, PolicyError, SandboxLostError, SandboxStartError, TaskError
from termrl.verifier.verdict import HARNESS, Cause, EndReason, Outcome, Verdict
from tests.agent.fakes import FAILED, PASSED, FakeEnvironment, ScriptedPolicy, reply

BARE = Opening(messages=({"role": "system", "content": "Act."},))


def bash(script: str) -> str:
    return f"```bash\n{script}\n```"


async def attempt(
    policy: Policy, environment: FakeEnvironment | None = None, opening: Opening = BARE, seed: int = 7, **limits: Any
) -> Episode:
    return await run_episode(
        environment or FakeEnvironment(), policy, task_id="t", opening=opening, limits=Limits(**limits), seed=seed
    )


async def test_an_episode_runs_commands_until_the_policy_says_it_is_done() -> None:
    environment = FakeEnvironment(outputs={"ls": "a\nb\n"})
    policy = ScriptedPolicy(bash("ls"), bash("rm a"), "TASK_COMPLETE")
    episode = await attempt(policy, environment)
    assert environment.commands == ["ls", "rm a"]
    assert [turn.kind for turn in episode.turns] == ["command", "command", "complete"]
    assert [turn.observation for turn in episode.turns] == ["a\nb", "(no output)", ""]
    assert (episode.end_reason, episode.reward, episode.verdict) == (EndReason.TASK_COMPLETE, 1.0, PASSED)
    assert policy.asked[2] == [
        {"role": "system", "content": "Act."},
        {"role": "user", "content": "Do t."},
        {"role": "assistant", "content": bash("ls")},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": bash("rm a")},
        {"role": "user", "content": "(no output)"},
    ]


async def test_the_instruction_reaches_the_first_prompt_from_reset_alone() -> None:
    text = "Write {instruction} and {braces} to a file."
    environment = FakeEnvironment(reset=Observation(instruction=text))
    policy = ScriptedPolicy("TASK_COMPLETE")
    episode = await attempt(policy, environment, opening=opening("terminal-bench"))
    assert policy.asked[0][-1]["content"] == f"# Task\n\n{text}"
    assert episode.instruction == text


async def test_demonstrations_come_before_the_instruction_and_the_opening_is_not_changed() -> None:
    first_steps = opening("first-steps")
    policy = ScriptedPolicy(bash("ls"), "TASK_COMPLETE")
    await attempt(policy, opening=first_steps)
    n = len(first_steps.messages)
    assert policy.asked[1][:n] == list(first_steps.messages) == list(opening("first-steps").messages)
    assert policy.asked[1][n] == {"role": "user", "content": "Do t."}


async def test_a_command_beside_the_word_runs_before_the_end() -> None:
    environment = FakeEnvironment()
    episode = await attempt(ScriptedPolicy(f"{bash('touch x')}\nTASK_COMPLETE"), environment)
    assert environment.commands == ["touch x"]
    assert (episode.end_reason, len(episode.turns)) == (EndReason.TASK_COMPLETE, 1)


async def test_assistant_messages_are_sent_back_verbatim() -> None:
    message = {"role": "assistant", "content": bash("ls"), "reasoning_content": "hm", "extra": {"x": [1]}}
    policy = ScriptedPolicy(reply(bash("ls"), message=message), "TASK_COMPLETE")
    await attempt(policy)
    assert policy.asked[1][-2] == message


@pytest.mark.parametrize("finish", ["length", "max_tokens"])
async def test_a_turn_cut_by_length_is_never_run_and_ends_the_episode_graded(finish: str) -> None:
    environment = FakeEnvironment(verdict=FAILED)
    policy = ScriptedPolicy(reply(bash("rm -rf x"), finish))
    episode = await attempt(policy, environment)
    assert environment.commands == []
    assert (episode.end_reason, episode.reward, episode.turns[0].kind) == (EndReason.LENGTH, 0.0, "cut")
    assert len(policy.asked) == 1


@pytest.mark.parametrize("finish", ["abort", "aborted", "cancelled"])
async def test_a_turn_aborted_by_the_engine_is_never_run_and_has_no_verdict(finish: str) -> None:
    environment = FakeEnvironment()
    episode = await attempt(ScriptedPolicy(reply(bash("ls"), finish)), environment)
    assert environment.actions == []
    assert (episode.end_reason, episode.reward) == (EndReason.ABORTED, None)
    assert episode.verdict is not None and episode.verdict.cause is Cause.CANCELLED


@pytest.mark.parametrize("finish", ["content_filter", "error", ""])
async def test_a_reply_that_may_not_be_whole_is_never_run(finish: str) -> None:
    environment = FakeEnvironment()
    episode = await attempt(ScriptedPolicy(reply(bash("ls"), finish)), environment)
    assert environment.actions == []
    assert (episode.end_reason, episode.reward) == (EndReason.POLICY_ERROR, None)
    assert repr(finish) in episode.error


async def test_a_turn_that_stopped_at_its_fence_is_run() -> None:
    environment = FakeEnvironment()
    await attempt(ScriptedPolicy(reply(bash("ls") + "\n", "fence"), "TASK_COMPLETE"), environment)
    assert environment.commands == ["ls"]


async def test_a_full_context_ends_the_episode_graded() -> None:
    environment = FakeEnvironment(verdict=PASSED)
    episode = await attempt(ScriptedPolicy(bash("touch x"), reply("", "context")), environment)
    assert (episode.end_reason, episode.reward) == (EndReason.CONTEXT, 1.0)


async def test_the_loop_stops_before_the_window_is_full() -> None:
    environment = FakeEnvironment(outputs={"cat big": "x" * 900})
    policy = ScriptedPolicy(reply(bash("cat big"), prompt_tokens=200, completion_tokens=10))
    episode = await attempt(policy, environment, context_window=512, max_tokens=64)
    assert (episode.end_reason, len(policy.asked), environment.evaluations) == (EndReason.CONTEXT, 1, 1)


async def test_the_last_turns_are_clamped_to_the_window_and_a_cut_there_is_the_contexts() -> None:
    policy = ScriptedPolicy(
        reply(bash("ls"), prompt_tokens=430, completion_tokens=10),
        reply(bash("ls"), "length", prompt_tokens=452, completion_tokens=58),
    )
    episode = await attempt(policy, context_window=512, max_tokens=64)
    assert policy.max_tokens[0] == 64
    assert 16 <= policy.max_tokens[1] < 64
    assert 440 + 5 + policy.max_tokens[1] <= 512
    assert episode.end_reason is EndReason.CONTEXT


async def test_format_errors_are_fed_back_a_bounded_number_of_times() -> None:
    environment = FakeEnvironment(verdict=FAILED)
    policy = ScriptedPolicy("I would run ls.")
    episode = await attempt(policy, environment, max_format_errors=2)
    assert len(policy.asked) == 3
    assert policy.asked[2][-1]["content"].startswith("Your reply held no command.")
    assert [turn.kind for turn in episode.turns] == ["format_error"] * 3
    assert [turn.error for turn in episode.turns] == ["no_command"] * 3
    assert (episode.end_reason, episode.reward) == (EndReason.NO_COMMAND, 0.0)
    assert environment.commands == []


async def test_two_commands_in_one_reply_run_neither() -> None:
    environment = FakeEnvironment()
    policy = ScriptedPolicy(f"{bash('ls')}\n{bash('rm x')}", "TASK_COMPLETE")
    episode = await attempt(policy, environment)
    assert environment.commands == []
    assert episode.turns[0].error == "several_commands"
    assert episode.end_reason is EndReason.TASK_COMPLETE


async def test_reasoning_is_never_run() -> None:
    environment = FakeEnvironment()
    thought = reply("", reasoning=bash("rm -rf /"), message={"role": "assistant", "reasoning_content": bash("rm")})
    await attempt(ScriptedPolicy(thought), environment, max_format_errors=0)
    assert environment.commands == []


async def test_native_tool_calls_are_answered_each_and_do_not_end_the_episode() -> None:
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "bash", "arguments": "{}"}} for n in (1, 2)]
    called = reply("", "tool_calls", message={"role": "assistant", "content": "", "tool_calls": calls})
    policy = ScriptedPolicy(called, bash("ls"), "TASK_COMPLETE")
    environment = FakeEnvironment()
    episode = await attempt(policy, environment)
    assert [(m["role"], m["tool_call_id"]) for m in policy.asked[1][-2:]] == [("tool", "c1"), ("tool", "c2")]
    assert policy.asked[1][-1]["content"].startswith("There are no tools")
    assert (episode.turns[0].error, environment.commands) == ("tool_call", ["ls"])


async def test_the_number_of_turns_is_bounded_and_then_graded() -> None:
    environment = FakeEnvironment()
    policy = ScriptedPolicy(bash("ls"))
    episode = await attempt(policy, environment, max_turns=3)
    assert (len(policy.asked), len(environment.commands), environment.evaluations) == (3, 3, 1)
    assert (episode.end_reason, episode.reward) == (EndReason.MAX_TURNS, 1.0)


async def test_a_policy_failure_has_no_verdict_and_names_itself() -> None:
    environment = FakeEnvironment()
    episode = await attempt(ScriptedPolicy(bash("ls"), PolicyError("http://x: HTTP 502: no logprobs")), environment)
    assert (episode.end_reason, episode.reward, environment.evaluations) == (EndReason.POLICY_ERROR, None, 0)
    assert episode.verdict is not None and episode.verdict.cause is Cause.ENGINE_ERROR
    assert episode.error == "http://x: HTTP 502: no logprobs"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (SandboxStartError("no user namespaces"), Cause.SANDBOX_START),
        (SandboxLostError("gone"), Cause.SANDBOX_LOST),
        (ConnectionResetError("reset by peer"), Cause.ENVIRONMENT_LOST),
        (RuntimeError("boom"), Cause.SANDBOX_START),
        (Observation(success=False, error="pull failed", info={"cause": "image_unavailable"}), Cause.IMAGE_UNAVAILABLE),
        (Observation(instruction=" \n"), Cause.SANDBOX_START),
    ],
)
async def test_a_failed_reset_has_no_verdict(fault: Observation | Exception, cause: Cause) -> None:
    policy = ScriptedPolicy(bash("ls"))
    episode = await attempt(policy, FakeEnvironment(reset=fault))
    assert (episode.end_reason, episode.reward, policy.asked) == (EndReason.ENVIRONMENT_ERROR, None, [])
    assert episode.verdict is not None and episode.verdict.cause is cause
    assert episode.error


async def test_a_task_that_can_never_run_is_the_callers_to_hear_of() -> None:
    with pytest.raises(TaskError, match="needs an image"):
        await attempt(ScriptedPolicy("TASK_COMPLETE"), FakeEnvironment(reset=TaskError("t: needs an image")))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(SandboxLostError("gone"), Cause.SANDBOX_LOST), (TimeoutError(), Cause.ENVIRONMENT_LOST)],
)
async def test_an_environment_lost_in_mid_episode_has_no_verdict(fault: Exception, cause: Cause) -> None:
    environment = FakeEnvironment(outputs={"ls": fault})
    episode = await attempt(ScriptedPolicy(bash("ls")), environment)
    assert (episode.end_reason, episode.reward, environment.evaluations) == (EndReason.ENVIRONMENT_ERROR, None, 0)
    assert episode.verdict is not None and episode.verdict.cause is cause
    assert len(episode.turns) == 1 and episode.error


async def test_an_environment_lost_while_scoring_has_no_verdict() -> None:
    environment = FakeEnvironment(verdict=SandboxLostError("gone"))
    episode = await attempt(ScriptedPolicy("TASK_COMPLETE"), environment)
    assert (episode.end_reason, episode.reward) == (EndReason.TASK_COMPLETE, None)
    assert episode.verdict is not None and episode.verdict.cause is Cause.SANDBOX_LOST


async def test_a_command_that_can_never_run_is_an_answer_to_the_policy() -> None:
    environment = FakeEnvironment(outputs={"ls": CommandError("the command holds a NUL byte")})
    policy = ScriptedPolicy(bash("ls"), "TASK_COMPLETE")
    episode = await attempt(policy, environment)
    assert policy.asked[1][-1]["content"] == "(error: the command holds a NUL byte)"
    assert episode.reward == 1.0


def timed(exec_s: float = 0.5, **info: Any) -> Observation:
    return Observation(info={"exit_code": 0, "duration_s": exec_s, **info})


async def test_the_wall_cap_counts_service_and_commands_but_not_queues() -> None:
    environment = FakeEnvironment(outputs={"work": timed(2.0)})
    policy = ScriptedPolicy(reply(bash("work"), service_s=1.0, queue_s=100.0))
    episode = await attempt(policy, environment, wall_s=9.0)
    assert len(policy.asked) == 3
    assert (episode.end_reason, episode.reward, environment.evaluations) == (EndReason.TIMEOUT, 0.0, 0)
    assert episode.verdict is not None and episode.verdict.cause is Cause.WALL_CAP
    assert (episode.timings["generation_s"], episode.timings["exec_s"]) == (3.0, 6.0)
    assert episode.timings["queue_s"] == 300.0


async def test_a_wall_cut_is_graded_in_evaluation() -> None:
    environment = FakeEnvironment(verdict=PASSED, outputs={"work": timed(5.0)})
    episode = await attempt(ScriptedPolicy(bash("work")), environment, wall_s=4.0, grade_cut=True)
    assert (episode.end_reason, episode.reward, environment.evaluations) == (EndReason.TIMEOUT, 1.0, 1)


async def test_the_tasks_own_timeout_tightens_the_cap() -> None:
    environment = FakeEnvironment(outputs={"work": timed(2.0)}, info={"agent_timeout_sec": 3.0})
    episode = await attempt(ScriptedPolicy(bash("work")), environment, wall_s=100.0)
    assert (episode.end_reason, len(environment.commands)) == (EndReason.TIMEOUT, 2)


async def test_a_command_gets_no_more_time_than_is_left_and_a_cut_there_is_a_timeout() -> None:
    cut = Observation(success=False, error="timed out", info={"exit_code": None, "timed_out": True, "duration_s": 2.9})
    environment = FakeEnvironment(outputs={"work": cut})
    episode = await attempt(ScriptedPolicy(reply(bash("work"), service_s=1.0)), environment, wall_s=4.0)
    assert environment.actions[0].wait_seconds == 3.0
    assert (episode.end_reason, episode.turns[0].timed_out) == (EndReason.TIMEOUT, True)


async def test_a_generation_beyond_the_cap_is_not_run() -> None:
    environment = FakeEnvironment()
    episode = await attempt(ScriptedPolicy(reply(bash("ls"), service_s=5.0)), environment, wall_s=4.0)
    assert (environment.commands, episode.end_reason, episode.turns[0].kind) == ([], EndReason.TIMEOUT, "cut")


async def test_a_command_that_timed_out_is_fed_back_and_the_episode_goes_on() -> None:
    cut = Observation(output="so far", success=False, error="x", info={"exit_code": None, "timed_out": True})
    environment = FakeEnvironment(outputs={"sleep 999": cut})
    policy = ScriptedPolicy(bash("sleep 999"), "TASK_COMPLETE")
    episode = await attempt(policy, environment, command_timeout_s=2.5)
    assert environment.actions[0].wait_seconds == 2.5
    assert policy.asked[1][-1]["content"] == "so far\n(timed out after 2.5 s; the command was killed)"
    assert episode.end_reason is EndReason.TASK_COMPLETE


async def test_long_output_goes_back_with_head_tail_and_mark() -> None:
    environment = FakeEnvironment(outputs={"yes": "a" * 5000 + "z" * 5000})
    policy = ScriptedPolicy(bash("yes"), "TASK_COMPLETE")
    await attempt(policy, environment, output_chars=100)
    assert policy.asked[1][-1]["content"] == "a" * 50 + "\n[... 9900 characters cut ...]\n" + "z" * 50


async def test_every_turn_has_its_own_seed_and_a_repeat_has_the_same() -> None:
    policies = [ScriptedPolicy(bash("ls")) for _ in range(3)]
    for policy, seed in zip(policies, (7, 7, 8), strict=True):
        await attempt(policy, max_turns=4, seed=seed)
    first, again, other = (policy.seeds for policy in policies)
    assert first == again == [turn_seed(7, turn) for turn in range(4)]
    assert not set(first) & set(other)
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in first)


async def test_a_cancelled_episode_closes_its_environment_and_passes_the_cancellation_on() -> None:
    environment = FakeEnvironment()
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.sleep(60)

    running = asyncio.create_task(attempt(ScriptedPolicy(hang), environment))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (environment.closed, environment.evaluations) == (1, 0)


async def test_a_second_cancellation_does_not_cut_the_closing_short() -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()

    class SlowToClose(FakeEnvironment):
        async def close(self) -> None:
            closing.set()
            await may_close.wait()
            await super().close()

    environment = SlowToClose()

    async def hang() -> None:
        await asyncio.sleep(60)

    running = asyncio.create_task(attempt(ScriptedPolicy(hang), environment))
    await asyncio.sleep(0.01)
    running.cancel()
    await closing.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    may_close.set()
    await asyncio.sleep(0.01)
    assert environment.closed == 1


async def test_a_finished_episode_leaves_closing_to_its_caller() -> None:
    environment = FakeEnvironment()
    await attempt(ScriptedPolicy("TASK_COMPLETE"), environment)
    assert environment.closed == 0


NO_VERDICTS = {
    "no reward": (Observation(success=False, error="verifier crashed"), Cause.VERIFIER_CRASH),
    "a reward beside an error": (
        Observation(reward=0.0, error="late", info={"harness": HARNESS}),
        Cause.VERIFIER_CRASH,
    ),
    "bare pytest": (Observation(reward=0.0, info={"harness": "pytest"}), Cause.ENVIRONMENT_LOST),
    "no harness": (Observation(reward=0.0), Cause.ENVIRONMENT_LOST),
    "beyond one": (Observation(reward=1.5, info={"harness": HARNESS}), Cause.BAD_REWARD),
    "not a number": (Observation(reward=float("nan"), info={"harness": HARNESS}), Cause.BAD_REWARD),
    "malformed": (Observation(reward=0.0, info={"verdict": {"outcome": "maybe"}}), Cause.ENVIRONMENT_LOST),
}


@pytest.mark.parametrize(("answer", "cause"), NO_VERDICTS.values(), ids=NO_VERDICTS.keys())
async def test_what_is_not_clearly_a_verdict_is_never_a_zero(answer: Observation, cause: Cause) -> None:
    episode = await attempt(ScriptedPolicy("TASK_COMPLETE"), FakeEnvironment(verdict=answer))
    assert episode.reward is None
    assert episode.verdict is not None and (episode.verdict.outcome, episode.verdict.cause) == (
        Outcome.NO_VERDICT,
        cause,
    )


@pytest.mark.parametrize(("reward", "expected"), [(1.0, 1.0), (0.0, 0.0), (0.4, 0.0)])
async def test_a_stranger_environments_verdict_counts_when_its_harness_is_the_tasks(
    reward: float, expected: float
) -> None:
    answer = Observation(reward=reward, done=True, info={"tests_passed": reward == 1.0, "harness": HARNESS})
    episode = await attempt(ScriptedPolicy("TASK_COMPLETE"), FakeEnvironment(verdict=answer))
    assert episode.reward == expected
    assert episode.verdict is not None and episode.verdict.raw_reward == reward


async def test_a_missing_verdict_from_the_environment_keeps_its_cause() -> None:
    verdict = Verdict.missing(Cause.BOOTSTRAP_FAILED, "429 from the registry")
    episode = await attempt(ScriptedPolicy("TASK_COMPLETE"), FakeEnvironment(verdict=verdict))
    assert (episode.reward, episode.verdict) == (None, verdict)
