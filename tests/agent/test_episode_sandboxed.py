"""Whole episodes in real sandboxes, scored by real tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from termrl.agent.episode import run_episode
from termrl.agent.prompts import opening
from termrl.agent.types import Episode, Limits, Policy
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.sandboxes.base import SandboxProvider
from termrl.verifier.verdict import Cause, EndReason
from tests.agent.fakes import ScriptedPolicy
from tests.verifier.tiny import SECRET, tiny_provider, tiny_task

SOLVE = f"echo {SECRET} > answer.txt"


def bash(script: str) -> str:
    return f"```bash\n{script}\n```"


@pytest.fixture
async def provider() -> AsyncIterator[SandboxProvider]:
    async with tiny_provider() as provider:
        yield provider


@pytest.fixture
def factory(provider: SandboxProvider, tmp_path: Path) -> LocalEnvironmentFactory:
    return LocalEnvironmentFactory({"tiny": tiny_task(tmp_path, files={"a.txt": "x\n"})}, provider)


async def attempt(factory: LocalEnvironmentFactory, policy: Policy, **limits: Any) -> Episode:
    environment = factory.create()
    try:
        return await run_episode(
            environment, policy, task_id="tiny", opening=opening("first-steps"), limits=Limits(**limits), seed=1
        )
    finally:
        await environment.close()


async def test_a_policy_that_solves_the_task_gets_one(factory: LocalEnvironmentFactory) -> None:
    policy = ScriptedPolicy(bash("ls"), bash(SOLVE), "TASK_COMPLETE")
    episode = await attempt(factory, policy)
    assert (episode.end_reason, episode.reward) == (EndReason.TASK_COMPLETE, 1.0)
    assert episode.instruction == "Write the answer to answer.txt."
    assert [turn.observation for turn in episode.turns] == ["a.txt", "(no output)", ""]
    assert all(episode.timings[name] > 0 for name in ("reset_s", "exec_s", "verify_s", "total_s"))


async def test_a_policy_that_only_says_so_gets_zero(factory: LocalEnvironmentFactory) -> None:
    episode = await attempt(factory, ScriptedPolicy("TASK_COMPLETE"))
    assert (episode.end_reason, episode.reward) == (EndReason.TASK_COMPLETE, 0.0)
    assert episode.verdict is not None and episode.verdict.cause is Cause.TESTS_FAILED


async def test_work_done_before_the_turns_ran_out_is_scored(factory: LocalEnvironmentFactory) -> None:
    episode = await attempt(factory, ScriptedPolicy(bash(SOLVE)), max_turns=1)
    assert (episode.end_reason, episode.reward) == (EndReason.MAX_TURNS, 1.0)


async def test_a_readme_with_fences_is_written_whole(factory: LocalEnvironmentFactory) -> None:
    readme = "# Use\n\n```bash\nmake\n```\n\n~~~\nx\n~~~"
    policy = ScriptedPolicy(bash(f"cat > README.md <<'EOF'\n{readme}\nEOF"), bash("cat README.md"), "TASK_COMPLETE")
    episode = await attempt(factory, policy)
    assert episode.turns[1].observation == readme


OUTPUTS = {
    "exit status": ("ls nowhere", "ls: cannot access 'nowhere': No such file or directory\n(exit status 2)"),
    "syntax error": ("if then", "(exit status 2)"),
    "not found": ("TASK_COMPLETE", "(exit status 127)"),
    "directory does not persist": ("pwd", "/app"),
    "background": ("sleep 999 &", "(no output)\n(1 background process running)"),
    "binary": ("printf 'a\\377\\376b'", "a\ufffd\ufffdb"),
    "NUL byte": ("echo a\0b", "(error: "),
    "too slow": ("echo begun; sleep 999", "begun\n(timed out after 1 s; the command was killed)"),
    "never ending": ("yes", "characters cut ...]"),
}


@pytest.mark.parametrize(("command", "text"), OUTPUTS.values(), ids=OUTPUTS.keys())
async def test_what_a_command_did_goes_back_bounded(factory: LocalEnvironmentFactory, command: str, text: str) -> None:
    policy = ScriptedPolicy(bash("cd /tmp"), bash(command), "TASK_COMPLETE")
    episode = await attempt(factory, policy, command_timeout_s=1.0, output_chars=200)
    assert text in episode.turns[1].observation
    assert len(episode.turns[1].observation) < 400
    assert policy.asked[2][-1] == {"role": "user", "content": episode.turns[1].observation}
    assert episode.reward == 0.0


async def test_a_real_wall_cap_cuts_a_command_short(factory: LocalEnvironmentFactory) -> None:
    start = time.monotonic()
    episode = await attempt(factory, ScriptedPolicy(bash(f"{SOLVE}; sleep 999")), wall_s=1.0)
    assert time.monotonic() - start < 10
    assert (episode.end_reason, episode.reward) == (EndReason.TIMEOUT, 0.0)
    assert episode.verdict is not None and episode.verdict.cause is Cause.WALL_CAP
    graded = await attempt(factory, ScriptedPolicy(bash(f"{SOLVE}; sleep 999")), wall_s=1.0, grade_cut=True)
    assert (graded.end_reason, graded.reward) == (EndReason.TIMEOUT, 1.0)


async def test_a_sandbox_that_dies_under_the_policy_is_no_zero(
    provider: SandboxProvider, factory: LocalEnvironmentFactory
) -> None:
    async def after_its_death() -> str:
        await provider.close()
        return bash("ls")

    episode = await attempt(factory, ScriptedPolicy(bash("ls"), after_its_death))
    assert (episode.end_reason, episode.reward) == (EndReason.ENVIRONMENT_ERROR, None)
    assert episode.verdict is not None and episode.verdict.cause is Cause.SANDBOX_LOST


async def test_a_cancelled_episode_leaves_no_sandbox(
    provider: SandboxProvider, factory: LocalEnvironmentFactory
) -> None:
    environment = factory.create()
    running = asyncio.create_task(
        run_episode(
            environment,
            ScriptedPolicy(bash("sleep 999")),
            task_id="tiny",
            opening=opening("first-steps"),
            limits=Limits(),
            seed=1,
        )
    )
    while provider.live == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert provider.live == 0


async def test_sixteen_episodes_at_once_do_not_see_each_other(factory: LocalEnvironmentFactory) -> None:
    def policy(n: int) -> ScriptedPolicy:
        work = SOLVE if n % 2 else f"echo {n} > answer.txt"
        return ScriptedPolicy(bash(work), bash("cat answer.txt; ls"), "TASK_COMPLETE")

    episodes = await asyncio.gather(*(attempt(factory, policy(n)) for n in range(16)))
    assert [episode.reward for episode in episodes] == [float(n % 2) for n in range(16)]
    for n, episode in enumerate(episodes):
        assert episode.turns[1].observation == f"{SECRET if n % 2 else n}\na.txt\nanswer.txt"
