"""Tasks that leave a service running: it must live through the tests, and only where the task says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.sandboxes.base import SandboxProvider
from termrl.verifier.verdict import Cause
from termrl.verifier.verify import verify
from tests.verifier.tiny import run, sandbox_of, tiny_task

ASK = """\
echo ping > question.txt
for _ in $(seq 12); do [ -s reply.txt ] && break; sleep 0.05; done
[ "$(cat reply.txt 2>/dev/null)" = "pong" ] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
"""

SERVE = """\
setsid bash -c 'while :; do
  if [ -s question.txt ]; then rm -f question.txt; echo pong > reply.new; mv reply.new reply.txt; fi; sleep 0.02
done' >/dev/null 2>&1 &
"""


async def test_a_kept_service_answers_the_tests_and_the_verdict_says_that_it_was_there(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = tiny_task(tmp_path, test=ASK, metadata={"termrl_keep_services": True})
    async with sandbox_of(provider, task) as sandbox:
        await run(sandbox, SERVE)
        verdict = await verify(sandbox, task)
    assert verdict.reward == 1.0
    assert verdict.signals["kept_services"] >= 1
    assert verdict.integrity == "exposed"


async def test_a_task_that_keeps_services_is_sealed_when_none_is_left(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = tiny_task(tmp_path, test=ASK, metadata={"termrl_keep_services": True})
    async with sandbox_of(provider, task) as sandbox:
        verdict = await verify(sandbox, task)
    assert (verdict.reward, verdict.integrity, verdict.signals) == (0.0, "sealed", {})


@pytest.mark.parametrize("metadata", [{}, {"termrl_keep_services": False}])
async def test_a_service_is_gone_before_the_tests_of_any_other_task(
    provider: SandboxProvider, tmp_path: Path, metadata: dict[str, bool]
) -> None:
    task = tiny_task(tmp_path, test=ASK, metadata=metadata)
    async with sandbox_of(provider, task) as sandbox:
        await run(sandbox, SERVE)
        verdict = await verify(sandbox, task)
    assert (verdict.reward, verdict.cause, verdict.integrity) == (0.0, Cause.TESTS_FAILED, "sealed")
