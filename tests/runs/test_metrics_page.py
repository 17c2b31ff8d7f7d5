"""docs/metrics.md and the code name the same metrics."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from termrl.agent.types import Episode
from termrl.rollout.groups import Group, build_batch
from termrl.runs.metrics import (
    EvalScores,
    FamilyScore,
    Timings,
    capture_metrics,
    eval_metrics,
    perf_metrics,
    rollout_metrics,
)
from termrl.training.grpo import update_metrics
from termrl.verifier.verdict import Cause, EndReason, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def recorded() -> set[str]:
    """Every name that a step or an evaluation records, with the open ends of names as on the page."""
    from termrl.training.trainer import UpdateMetrics

    ok = Episode("t", 0, reward=1.0, end_reason=EndReason.TASK_COMPLETE)
    lost = Episode("t", 0, end_reason=EndReason.ENVIRONMENT_ERROR, verdict=Verdict.missing(Cause.SANDBOX_LOST))
    ok.info["lost"] = [{"cause": "environment_lost"}]
    groups = [Group(0, "t", "f", (ok, lost))]
    update = UpdateMetrics()
    names = {
        **rollout_metrics(groups, build_batch(groups)),
        **capture_metrics([ok]),
        **update_metrics(update),
        **update_metrics(replace(update, skipped="no_episode")),
        **perf_metrics(Timings(1, 1, 1, 1), episodes=1, tokens=1),
        **eval_metrics(EvalScores({"a": FamilyScore(1, 1), "b": FamilyScore(1, 1)}, frozenset("b"), {}, {1: 1.0})),
    }
    ends = {"episodes_dropped": "cause", "episodes_retried": "cause", "end_reason": "reason"}
    ends |= {"family": "family", "pass_at": "k"}
    return {re.sub(rf"/({'|'.join(ends)})/.*", lambda m: f"/{m[1]}/<{ends[m[1]]}>", name) for name in names}


def test_the_page_describes_every_recorded_metric_and_no_other() -> None:
    rows = re.findall(r"^\| `((?:rollout|train|eval|perf)/[^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == recorded()


def test_every_row_says_what_the_metric_means() -> None:
    rows = [
        line.split(" | ")
        for line in PAGE.read_text(encoding="utf-8").replace(r"\|", "").splitlines()
        if re.match(r"\| `(rollout|train|eval|perf)/", line)
    ]
    assert all(len(row) == 4 and row[1].strip() for row in rows), [row for row in rows if len(row) != 4]
