"""Every family in a real sandbox: the oracle's solution scores 1, an untouched machine 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.tasks import TaskSet
from termrl.tasks.generate import FAMILIES, Split, generate

oracle = pytest.importorskip("termrl.verifier.oracle")
pytest.importorskip("termrl.sandboxes.bubblewrap")


@pytest.mark.parametrize("split", ["train", "eval"])
async def test_every_family_is_sound_in_a_bubblewrap_sandbox(tmp_path: Path, split: Split) -> None:
    from termrl.sandboxes import open_provider  # pyright: ignore[reportAttributeAccessIssue]

    generate(tmp_path / "suite", families=list(FAMILIES), per_family=1, split=split)
    async with open_provider("bubblewrap") as provider:
        for task in TaskSet.load(tmp_path / "suite").values():
            check = await oracle.golden_check(provider, task)
            assert check.oracle.raw_reward == 1, (task.id, check.oracle.output_tail)
            assert check.nop.raw_reward == 0, (task.id, check.nop)
            assert check.nop.output_tail.startswith("FAIL: ")
