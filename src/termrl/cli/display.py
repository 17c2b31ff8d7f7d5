"""What a training run looks like in a terminal, and in a log when there is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from termrl.agent.types import Episode
from termrl.cli.live import LiveDisplay, clock, progress_bar
from termrl.runs.metrics import EvalScores

_AXIS = 6  # columns left of the curve
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_COLUMNS = ("step", "reward", "pass rate", "dead groups", "episodes/s", "tokens/s", "step time", "time left")
_WIDTHS = (8, 7, 10, 12, 11, 9, 10, 10)


class TrainDisplay(LiveDisplay):
    """Follows one run: one line per step and evaluation, and below them, on a terminal, a live status line.

    Use as a context manager around the run.
    """

    def __init__(self, console: Console, *, program: str = "termrl") -> None:
        super().__init__(console)
        self._program = program
        self._steps = 0
        self._first = 1
        self._step = 0
        self._phase = "set-up"
        self._done = self._total = self._passed = self._graded = self._tokens = 0
        self._since = self._training_since = self._step_ended = time.monotonic()
        self._finished = 0
        self._evaluation_s = 0.0
        self._header_shown = False

    def started(self, run: Path, *, steps: int, first_step: int) -> None:
        """The run folder stands."""
        self._steps, self._first = steps, first_step
        self._print(f"run folder {run}")

    def sandboxes(self, live: Callable[[], int]) -> None:
        """Not shown."""

    def phase(self, name: str, *, step: int, total: int) -> None:
        """A phase begins."""
        if name == "rollout" and step == self._first:
            self._training_since = time.monotonic()
        self._phase, self._step, self._total = name, step, total
        self._done = self._passed = self._graded = self._tokens = 0
        self._since = time.monotonic()

    def episode(self, episode: Episode) -> None:
        """One episode ended."""
        self._done += 1
        self._graded += episode.reward is not None
        self._passed += episode.reward is not None and episode.reward >= 1.0
        self._tokens += sum(turn.completion_tokens or 0 for turn in episode.turns)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is recorded: one line for good."""
        if not self._header_shown:
            self._print(_columns(_COLUMNS))
            self._header_shown = True
        self._step = step
        self._finished += 1
        self._step_ended = time.monotonic()
        values = (
            f"{step}/{self._steps}",
            _rate(metrics.get("rollout/raw_reward")),
            _rate(metrics.get("rollout/pass_rate")),
            f"{metrics['rollout/zero_variance_groups'] + metrics['rollout/single_valid_groups']:.0f}",
            f"{metrics['perf/episodes_per_s']:.1f}",
            f"{metrics['perf/tokens_per_s']:.0f}",
            f"{metrics['perf/step_s']:.1f} s",
            clock(self._left()),
        )
        self._print(_columns(values))
        dropped = {k.rsplit("/", 1)[1]: v for k, v in metrics.items() if k.startswith("rollout/episodes_dropped/")}
        if dropped:
            causes = ", ".join(f"{count:.0f} {cause}" for cause, count in dropped.items())
            self._print(f"        dropped without a verdict: {causes}")
        retried = sum(v for k, v in metrics.items() if k.startswith("rollout/episodes_retried/"))
        if retried:
            self._print(f"        lost their environment and were played again: {retried:.0f}")

    def evaluated(self, name: str, scores: EvalScores) -> None:
        """An evaluation is recorded."""
        self._evaluation_s = time.monotonic() - self._since
        line = f"evaluation {name}: pass rate {_rate(scores.overall())} on held-out tasks"
        if scores.untrained:
            line += f", {_rate(scores.overall(untrained=True))} on untrained families"
        self._print(line)

    def finished(self, summary: Mapping[str, Any], rewards: Mapping[int, float]) -> None:
        """The run is over: the curve, the table, where everything is and what to do next."""
        self._take_away()
        run = summary.get("run_dir", "")
        if len(rewards) > 1:
            self._console.print()
            self._print(reward_curve(rewards, width=min(self._console.width, 100)))
        if summary["eval_by_family"]:
            self._console.print(family_table(summary))
        self._print(
            f"\n{summary['steps']} steps, {summary['episodes']} episodes, {summary['tokens_trained']} tokens trained, "
            f"{clock(summary['wall_s'])} min; logprob_diff {summary['logprob_diff']:.1e}, "
            f"re-rendered turns {summary['re_rendered_turns']}"
        )
        if summary.get("stopped"):
            self._print(f"stopped early: {summary['stopped']}")
        self._print(f"run folder: {run}")
        if summary["steps"]:
            self._print(f"next:       {self._program} export {run} --merged --out {run}/model")

    def _left(self) -> float | None:
        """Seconds until the run is over, the last evaluation included; ``None`` before the first step is done."""
        if not self._finished or self._phase == "evaluate":
            return None
        a_step = (self._step_ended - self._training_since) / self._finished
        to_come = self._steps - (self._first - 1) - self._finished
        return max(0.0, a_step * to_come - (time.monotonic() - self._step_ended)) + self._evaluation_s

    def _status(self) -> list[str]:
        elapsed = max(time.monotonic() - self._since, 1e-9)
        parts = [f" {self._phase}"]
        if self._phase == "rollout" or self._phase == "update":
            parts[0] += f" of step {self._step}/{self._steps}"
        if self._total:
            parts.append(f"{progress_bar(self._done, self._total)} {self._done}/{self._total} episodes")
            if self._graded:
                parts.append(f"pass rate {_rate(self._passed / self._graded)}")
            parts.append(f"{self._done / elapsed:.1f} episodes/s")
            if self._tokens:
                parts.append(f"{self._tokens / elapsed:.0f} tokens/s")
        parts.append(f"{elapsed:.0f} s")
        left = self._left()
        if left is not None:
            parts.append(f"about {clock(left)} left")
        return parts


def reward_curve(rewards: Mapping[int, float], *, width: int, height: int = 10) -> str:
    """Mean reward by step as bars of eighths, axes included: at most ``width`` columns and ``height`` + 2 lines.

    Where there are more steps than columns, a column shows the mean of several.
    """
    steps = sorted(rewards)
    room = max(1, width - _AXIS)
    per_column = -(-len(steps) // room)
    chunks = [steps[at : at + per_column] for at in range(0, len(steps), per_column)]
    values = [min(1.0, max(0.0, sum(rewards[step] for step in chunk) / len(chunk))) for chunk in chunks]
    bar = max(1, min(4, room // len(values)))
    lines = ["mean reward by step"]
    for row in range(height - 1, -1, -1):
        label = {height - 1: "1.0", (height - 1) // 2: "0.5", 0: "0.0"}.get(row, "")
        cells = (_EIGHTHS[round(8 * min(1.0, max(0.0, value * height - row)))] for value in values)
        lines.append(
            f"{label:>{_AXIS - 2}} ┤" + "".join((cell * (bar - 1) + (" " if bar > 1 else cell)) for cell in cells)
        )
    first, last = str(steps[0]), str(steps[-1])
    gap = max(1, bar * len(values) - len(first) - len(last) - (1 if bar > 1 else 0))
    lines.append(" " * _AXIS + first + " " * gap + last)
    return "\n".join(line.rstrip()[:width] for line in lines)


def family_table(summary: Mapping[str, Any]) -> Table:
    """Pass rates before and after by family, trained families first, untrained ones apart."""
    table = Table(title="pass rate on held-out tasks", title_justify="left")
    table.add_column("family")
    for name in ("episodes", "before", "after"):
        table.add_column(name, justify="right")
    families: Mapping[str, Mapping[str, Any]] = summary["eval_by_family"]
    for trained in (True, False):
        rows = {name: row for name, row in families.items() if row["trained"] is trained}
        if not rows:
            continue
        for name, row in rows.items():
            table.add_row(name, str(row["episodes"]), _rate(row["before"]), _rate(row["after"]))
        key = "" if trained else "_untrained"
        label = "all trained families" if trained else "all untrained families"
        count = str(sum(row["episodes"] for row in rows.values()))
        before, after = summary.get(f"eval_before{key}"), summary.get(f"eval_after{key}")
        table.add_section()
        table.add_row(label, count, _rate(before), _rate(after), style="bold", end_section=True)
    return table


def program_name(argv0: str) -> str:
    """How the user can call this program again: ``termrl`` if the shell finds it, else the path that was called."""
    path = Path(argv0)
    if path.name != "termrl":
        return "python -m termrl"
    found = shutil.which("termrl")
    if found is not None and Path(found).resolve() == path.resolve():
        return "termrl"
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _columns(values: tuple[str, ...]) -> str:
    return " ".join(value.rjust(width) for value, width in zip(values, _WIDTHS, strict=True))


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
