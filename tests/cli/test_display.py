from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from termrl.agent.types import Episode, Turn
from termrl.cli.display import TrainDisplay, family_table, program_name, reward_curve
from termrl.runs.metrics import EvalScores, FamilyScore

METRICS: dict[str, float] = {
    "rollout/raw_reward": 0.5,
    "rollout/pass_rate": 0.5,
    "rollout/zero_variance_groups": 1,
    "rollout/single_valid_groups": 0,
    "rollout/episodes_dropped/sandbox_lost": 3,
    "perf/episodes_per_s": 4.0,
    "perf/tokens_per_s": 321.0,
    "perf/step_s": 12.5,
}
SUMMARY: dict[str, Any] = {
    "eval_before": 0.25,
    "eval_after": 0.875,
    "eval_before_untrained": 0.0,
    "eval_after_untrained": 0.125,
    "eval_by_family": {
        "sort-file": {"before": 0.0, "after": 0.125, "episodes": 8, "trained": False},
        "make-dir": {"before": 0.25, "after": 0.875, "episodes": 8, "trained": True},
    },
    "steps": 2,
    "episodes": 128,
    "tokens_trained": 1000,
    "wall_s": 125.0,
    "logprob_diff": 2e-6,
    "re_rendered_turns": 0,
    "stopped": None,
    "run_dir": "runs/x",
}


def follow(console: Console) -> None:
    with TrainDisplay(console, program=".venv/bin/termrl") as display:
        display.started(Path("runs/x"), steps=2, first_step=1)
        display.phase("evaluate", step=0, total=1)
        scores = {"make-dir": FamilyScore(2, 8), "sort-file": FamilyScore(0, 8)}
        display.evaluated("before", EvalScores(scores, frozenset({"sort-file"})))
        for step in (1, 2):
            display.phase("rollout", step=step, total=2)
            display.episode(Episode("t", 0, reward=1.0, turns=[Turn(0, "x", "stop", "complete", completion_tokens=5)]))
            display.episode(Episode("t", 0, reward=None))
            display.phase("update", step=step, total=0)
            display.step(step, METRICS)
        display.finished(SUMMARY, {1: 0.5, 2: 0.75})


def test_a_log_without_a_terminal_is_plain_lines_with_every_figure() -> None:
    out = io.StringIO()
    follow(Console(file=out, width=120))
    text = out.getvalue()
    assert "\x1b" not in text
    assert "evaluation before: pass rate 0.25 on held-out tasks, 0.00 on untrained families" in text
    step = next(line for line in text.splitlines() if line.strip().startswith("2/2"))
    assert step.split() == ["2/2", "0.50", "0.50", "1", "4.0", "321", "12.5", "s", "0:00"]
    assert "dropped without a verdict: 3 sandbox_lost" in text
    assert "mean reward by step" in text
    assert "run folder: runs/x" in text
    assert ".venv/bin/termrl export runs/x --merged --out runs/x/model" in text


def test_on_a_terminal_a_live_line_is_drawn_and_taken_away() -> None:
    out = io.StringIO()
    follow(Console(file=out, width=120, force_terminal=True))
    assert "\x1b[" in out.getvalue()
    assert "episodes/s" in out.getvalue()
    assert "run folder: runs/x" in out.getvalue()


def test_untrained_families_stand_apart_below_the_trained_ones() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(family_table(SUMMARY))
    lines = console.export_text().splitlines()
    order = [
        next(i for i, line in enumerate(lines) if name in line)
        for name in ("make-dir", "all trained families", "sort-file", "all untrained families")
    ]
    assert order == sorted(order)
    assert "0.25" in lines[order[1]]
    assert "0.88" in lines[order[1]]


def test_the_curve_rises_with_the_reward_and_names_first_and_last_step() -> None:
    lines = reward_curve({step: step / 10 for step in range(1, 11)}, width=60).splitlines()
    heights = [
        sum(line[6 + 4 * column] == "█" for line in lines[1:-1] if len(line) > 6 + 4 * column) for column in range(10)
    ]
    assert heights == list(range(1, 11))
    assert lines[-1].split() == ["1", "10"]


@pytest.mark.parametrize(("steps", "width"), [(1, 40), (15, 60), (60, 80), (1000, 50)])
def test_the_curve_fits_its_width(steps: int, width: int) -> None:
    lines = reward_curve(dict.fromkeys(range(1, steps + 1), 0.5), width=width).splitlines()
    assert len(lines) == 12
    assert all(len(line) <= width for line in lines)
    assert max(len(line) for line in lines[6:-1]) > min(steps, 10)


def test_the_next_command_names_the_program_as_it_was_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / ".venv" / "bin" / "termrl"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert program_name(".venv/bin/termrl") == ".venv/bin/termrl"
    monkeypatch.setenv("PATH", str(program.parent))
    assert program_name(str(program)) == "termrl"
    assert program_name("/x/termrl/__main__.py") == "python -m termrl"
