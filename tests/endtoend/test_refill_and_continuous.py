"""Whole runs on a tiny model: zero-variance groups that are refilled, the continuous schedule, a full fine-tune."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from termrl.runs.files import read_jsonl
from tests.endtoend.test_training_run import figures, run_here, tokens
from tests.endtoend.tiny import write_model, write_tasks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("refill")
    write_model(folder / "model")
    never = "echo 0 > /logs/verifier/reward.txt\n"
    write_tasks(folder / "train", ("apple", "berry", "cedar"))
    write_tasks(folder / "train", ("apple", "berry", "cedar"), family="never", prefix="never", test=never)
    write_tasks(folder / "held-out", ("delta",), prefix="eval")
    yield folder


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(run / "metrics.jsonl") if record["phase"] == "train"]


def test_groups_without_a_signal_are_refilled_up_to_the_bound_the_same_each_time(world: Path) -> None:
    for name in ("once", "again"):
        summary = run_here(world, world / name, rollout__groups=2, rollout__refill=3, steps=3)
    assert figures(world / "once") == figures(world / "again")
    assert tokens(world / "once") == tokens(world / "again")
    steps = steps_of(world / "once")
    assert sum(step["rollout/refilled_groups"] for step in steps) > 0
    for step in steps:
        played = step["rollout/episodes"] / 6
        assert played == 2 + step["rollout/refilled_groups"] <= 5
        signal = played - step["rollout/zero_variance_groups"]
        assert signal == 2 or played == 5
    assert summary["tokens_trained"] == summary["tokens_captured"] - summary["tokens_masked"] > 0
    tasks: defaultdict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in read_jsonl(world / "once" / "episodes.jsonl"):
        if record["phase"] == "train":
            tasks[record["step"]][record["group"]].add(record["task_id"])
    for groups in tasks.values():
        assert all(len(names) == 1 for names in groups.values())
        assert len(set.union(*groups.values())) == len(groups)


def test_without_refill_nothing_more_is_played(world: Path) -> None:
    run_here(world, world / "plain", rollout__groups=2, steps=1)
    (step,) = steps_of(world / "plain")
    assert (step["rollout/episodes"], step["rollout/refilled_groups"]) == (12, 0)


def test_a_continuous_run_keeps_the_account(world: Path) -> None:
    summary = run_here(
        world, world / "continuous", rollout__schedule="continuous", rollout__concurrency=5, rollout__groups=4, steps=3
    )
    assert (summary["steps"], summary["episodes"], summary["dropped"]) == (3, 72, {})
    assert summary["tokens_trained"] == summary["tokens_captured"] - summary["tokens_masked"] > 0
    assert summary["logprob_diff"] <= 1e-4
    assert summary["re_rendered_turns"] == 0


def test_a_full_fine_tune_is_exact_and_ends_with_a_model(world: Path) -> None:
    from termrl.training import checkpoints

    summary = run_here(world, world / "full", training__full="true", training__lr=0.003, steps=2)
    assert summary["logprob_diff"] <= 1e-4
    assert summary["training"]["full"] is True
    latest = checkpoints.latest(world / "full")
    assert latest is not None
    assert orjson.loads((latest / "model" / "config.json").read_bytes())["dtype"] == "float32"
