"""What people who do this job ran into, where verifier and environment touch it; each test names the kind of fault.

The closed tables of reasons and causes have their own tests (tests/verifier/test_causes.py).
"""

from __future__ import annotations

import time
from pathlib import Path

from termrl.environment.protocol import Action, Observation
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.errors import SandboxStartError
from termrl.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from termrl.tasks.task import Task
from termrl.verifier.oracle import golden_check
from termrl.verifier.verdict import Cause, Finding, Verdict
from tests.verifier.tiny import SECRET, tiny_task

EVALUATE = Action(action_type="evaluate")


def verdict_in(observation: Observation) -> Verdict:
    return Verdict.model_validate(observation.info["verdict"])


async def after(provider: SandboxProvider, task: Task, *actions: Action) -> Verdict:
    environment = LocalEnvironmentFactory({task.id: task}, provider).create()
    try:
        await environment.reset(task.id)
        for action in actions:
            await environment.step(action)
        return verdict_in(await environment.step(EVALUATE))
    finally:
        await environment.close()


async def test_a_toolchain_that_the_tests_lack_is_no_verdict_and_not_a_silent_zero(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    test = "set -e; no-such-cargo test; echo 1 > /logs/verifier/reward.txt"
    verdict = await after(provider, tiny_task(tmp_path, test=test))
    assert (verdict.reward, verdict.cause) == (None, Cause.VERIFIER_CRASH)
    assert "command not found" in verdict.output_tail and verdict.exit_code == 127
    assert verdict.attribution is not None and verdict.attribution.finding is Finding.UNTOUCHED_SILENT


async def test_tests_and_files_of_two_megabytes_go_through(provider: SandboxProvider, tmp_path: Path) -> None:
    test = "cmp big.txt /tests/big.txt && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    task = tiny_task(tmp_path, test=test)
    text = "x" * 79 + "\n"
    (task.tests / "big.txt").write_text(text * 26_000)
    assert (
        await after(provider, task, Action(action_type="write_file", file_path="big.txt", content=text))
    ).reward == 0
    write = Action(action_type="write_file", file_path="big.txt", content=text * 26_000)
    assert (await after(provider, task, write)).reward == 1.0


async def test_runaway_commands_hold_neither_the_verdict_nor_the_end(provider: SandboxProvider, tmp_path: Path) -> None:
    spin = "for i in 1 2 3 4 5 6; do setsid bash -c 'trap \"\" 1 2 15; while :; do :; done' >/dev/null 2>&1 & done"
    started = time.monotonic()
    verdict = await after(provider, tiny_task(tmp_path), Action(command=spin))
    assert verdict.reward == 0.0 and verdict.signals["killed"]["count"] == 6
    assert time.monotonic() - started < 15 and provider.live == 0


async def test_a_task_that_scores_one_untouched_is_found(provider: SandboxProvider, tmp_path: Path) -> None:
    check = await golden_check(provider, tiny_task(tmp_path, test="echo 1 > /logs/verifier/reward.txt"))
    assert not check.sound and check.nop.reward == 1.0


class FlakyProvider(SandboxProvider):
    """A real provider of whose starts some fail: now one of a reset, now one of an attribution."""

    name = "flaky"

    def __init__(self, inner: SandboxProvider) -> None:
        self.inner = inner
        self.asked = 0

    def refusal(self, spec: SandboxSpec) -> str | None:
        return self.inner.refusal(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.asked += 1
        if self.asked % 5 in (2, 3):
            raise SandboxStartError(f"{spec.task_id}: no memory")
        return await self.inner.create(spec)

    async def close(self) -> None:
        await self.inner.close()

    @property
    def live(self) -> int:
        return self.inner.live


async def test_retried_resets_and_failed_attribution_leak_no_sandbox(provider: SandboxProvider, tmp_path: Path) -> None:
    flaky = FlakyProvider(provider)
    task = tiny_task(tmp_path, test="exit 1")
    environment = LocalEnvironmentFactory({task.id: task}, flaky).create()
    failed = 0
    for _ in range(8):
        try:
            await environment.reset(task.id)
        except SandboxStartError:
            failed += 1
            assert flaky.live == 0, "a failed reset holds nothing"
            continue
        assert flaky.live == 1
        await environment.step(Action(command=f"echo {SECRET} > answer.txt"))
        verdict = verdict_in(await environment.step(EVALUATE))
        assert (verdict.reward, verdict.cause) == (None, Cause.VERIFIER_CRASH)
        assert flaky.live == 0
    assert failed >= 2, "some resets did fail"
    await environment.close()
    assert flaky.live == 0
