"""``[verifier] user``: who runs the tests, in containers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrl.sandboxes.base import SandboxProvider
from termrl.tasks import load_task
from termrl.verifier.oracle import golden_check
from termrl.verifier.verdict import Cause
from termrl.verifier.verify import verify
from tests.attacks.backends import open_backend
from tests.verifier.tiny import SECRET, handed_over, run, tiny_task

TEST = """\
[ "$(cat answer.txt 2>/dev/null)" = "$(cat /tests/expected.txt)" ] && reward=1 || reward=0
id -un; echo "$HOME"; touch "$HOME/mine" && echo $reward > /logs/verifier/reward.txt
"""


@pytest.fixture
async def docker(docker_required: None) -> AsyncIterator[SandboxProvider]:
    async with open_backend("docker") as provider:
        yield provider


@pytest.mark.parametrize("user", ["nobody", "65534", None, "root"])
async def test_the_tests_are_run_by_the_user_that_the_task_names(
    docker: SandboxProvider, tmp_path: Path, user: str | None
) -> None:
    task = tiny_task(tmp_path, test=TEST, spec={"verifier_user": user})
    async with handed_over(docker, task) as (sandbox, baseline):
        assert (await verify(sandbox, task, baseline=baseline)).reward == 0.0
        await run(sandbox, f"echo {SECRET} > answer.txt")
        verdict = await verify(sandbox, task, baseline=baseline)
    assert verdict.reward == 1.0, verdict
    assert verdict.output_tail.startswith("nobody" if user in ("nobody", "65534") else "root")


async def test_a_user_that_the_image_does_not_have_is_no_verdict(docker: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, test=TEST, spec={"verifier_user": "stranger"})
    async with handed_over(docker, task) as (sandbox, baseline):
        verdict = await verify(sandbox, task, baseline=baseline)
    assert (verdict.reward, verdict.cause) == (None, Cause.VERIFIER_CRASH) and "stranger" in verdict.detail


async def test_without_one_it_is_the_images_user_whoever_the_agent_is(docker: SandboxProvider) -> None:
    for name, user in (("image-user", "worker"), ("agent-user", "root")):
        task = load_task(Path(__file__).parents[1] / "dockertasks" / name)
        assert (await golden_check(docker, task)).sound, f"tests are not run by {user}"
