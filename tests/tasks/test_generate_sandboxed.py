"""Every family in a real sandbox: the oracle's solution scores 1, an untouched machine 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.tasks import TaskSet, load_task
from termrl.tasks.generate import FAMILIES, Split, generate

oracle = pytest.importorskip("termrl.verifier.oracle")
pytest.importorskip("termrl.sandboxes.bubblewrap")

_SEEDS = 20
# Each task of /suite in turn, in the sandbox's own /app: what its tests say before and after its solution.
_IN_TURN = """
mkdir -p /logs/verifier
for task in /suite/*; do
  cd /app && find . -mindepth 1 -delete && cp -a "$task/environment/." . || exit 1
  bash "$task/tests/test.sh" > /tmp/said && before="$(< /logs/verifier/reward.txt) $(< /tmp/said)"
  bash "$task/solution/solve.sh" > /dev/null 2> /tmp/error || echo "$task: solve.sh: $(< /tmp/error)"
  bash "$task/tests/test.sh" > /tmp/said && after="$(< /logs/verifier/reward.txt) $(< /tmp/said)"
  echo "${task##*/} $before | $after"
done
"""


@pytest.mark.parametrize("split", ["train", "eval"])
async def test_every_family_is_sound_in_a_bubblewrap_sandbox(tmp_path: Path, split: Split) -> None:
    from termrl.sandboxes import open_provider

    # a part of the families in each split: the next test has them all
    names = list(FAMILIES)[split == "eval" :: 2]
    generate(tmp_path / "suite", families=names, per_family=1, split=split)
    async with open_provider("bubblewrap") as provider:
        for task in TaskSet.load(tmp_path / "suite").values():
            check = await oracle.golden_check(provider, task)
            assert check.oracle.raw_reward == 1, (task.id, check.oracle.output_tail)
            assert check.nop.raw_reward == 0, (task.id, check.nop)
            assert check.nop.output_tail.startswith("FAIL: ")


async def test_over_20_seeds_of_every_family_the_oracle_scores_1_and_doing_nothing_0(tmp_path: Path) -> None:
    from termrl.sandboxes import open_provider

    async with open_provider("bubblewrap") as provider:
        for name in FAMILIES:
            suite = tmp_path / name
            for seed in range(_SEEDS):
                split: Split = "eval" if seed % 2 else "train"
                (task,) = generate(tmp_path / "one", families=[name], per_family=1, split=split, seed=seed)
                task.rename(_made(suite) / f"{seed:02d}")
                (tmp_path / "one").rmdir()
            sandbox = await provider.create(load_task(suite / "00").resolved_sandbox())
            try:
                await sandbox.put(suite, "/suite")
                done = await sandbox.exec(_IN_TURN, timeout_s=30)
            finally:
                await sandbox.stop()
            lines = done.output.splitlines()
            assert len(lines) == _SEEDS, (name, done.output)
            for seed, line in enumerate(lines):
                assert line.startswith(f"{seed:02d} 0 FAIL: "), (name, line)
                assert line.endswith(" | 1 "), (name, line)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder
