"""Tests on Python's own pytest: the attacks on it do work where nothing is done about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.attacks import chosen
from termrl.sandboxes.base import SandboxProvider
from termrl.verifier.verify import verify
from tests.attacks.kinds import installed_task, pytest_task
from tests.verifier.tiny import handed_over, run, tiny_task

WORKING = ("ini-above-the-tests", "conftest-above-the-tests", "pytest-module-in-the-workdir")
WORKING_ON_A_SYSTEM = ("site-hooks", "pth-file", "pytest-plugin", "replaced-modules", "replaced-bytecode")


@pytest.mark.parametrize("name", WORKING)
async def test_an_attack_on_pytest_would_work_without_the_defence(
    provider: SandboxProvider, tmp_path: Path, name: str
) -> None:
    task = pytest_task(tmp_path)
    (attack,) = chosen([name])
    async with handed_over(provider, task) as (sandbox, baseline):
        await run(sandbox, attack.turns[0])
        assert (await verify(sandbox, task)).reward == 1.0
        assert (await verify(sandbox, task, baseline=baseline)).reward == 0.0


@pytest.mark.parametrize("name", WORKING_ON_A_SYSTEM)
async def test_an_attack_on_installed_packages_would_work_without_the_defence(
    docker: SandboxProvider, tmp_path: Path, python_image: str, name: str
) -> None:
    task = installed_task(tmp_path, spec={"image": python_image})
    (attack,) = chosen([name])
    async with handed_over(docker, task) as (sandbox, baseline):
        await run(sandbox, attack.turns[0])
        assert (await verify(sandbox, task)).reward == 1.0
        assert (await verify(sandbox, task, baseline=baseline)).reward == 0.0


async def test_what_the_task_itself_brings_for_pytest_stays(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, test="cat /app/pytest.py > /logs/verifier/reward.txt", files={"pytest.py": "1\n"})
    async with handed_over(provider, task) as (sandbox, baseline):
        verdict = await verify(sandbox, task, baseline=baseline)
    assert (verdict.reward, verdict.signals) == (1.0, {})
