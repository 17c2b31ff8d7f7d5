"""What an evaluation looks like: a live line while it runs, tables when it is over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from termrl.agent.types import Episode
from termrl.cli.live import LiveDisplay, clock, progress_bar
from termrl.rollout.groups import cause_of, lost_attempts
from termrl.training.events import Silent

_LINE_EVERY_S = 30.0
_SHOWN_TASKS = 20


class EvalDisplay(LiveDisplay, Silent):
    """Follows an evaluation; attempts without a verdict stand apart from those that failed.

    Use as a context manager. On a terminal there is a live line, in a log one line now and then.

    Args:
        kept: results that are there already.
    """

    def __init__(self, console: Console, *, kept: int = 0) -> None:
        super().__init__(console)
        self._kept = kept
        self._total = self._done = self._passed = self._failed = self._tokens = self._again = 0
        self._missing: Counter[str] = Counter()
        self._since = self._said = time.monotonic()

    def started(self, run: Path, *, steps: int, first_step: int) -> None:
        """The folder stands."""
        self._print(f"results in {run}")

    def phase(self, name: str, *, step: int, total: int) -> None:
        """The attempts begin."""
        self._total, self._since = total, time.monotonic()
        if self._kept:
            self._print(f"{self._kept} attempts have a verdict already, {total} are to be made")

    def episode(self, episode: Episode) -> None:
        """An attempt ended."""
        self._done += 1
        self._tokens += sum(turn.completion_tokens or 0 for turn in episode.turns)
        self._again += sum(lost_attempts([episode]).values())
        if episode.reward is None:
            cause = cause_of(episode)
            if cause not in self._missing:
                self._print(f"{episode.task_id}: no verdict: {cause}: {episode.error}")
            self._missing[cause] += 1
        elif episode.reward >= 1.0:
            self._passed += 1
        else:
            self._failed += 1
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said >= _LINE_EVERY_S:
            self._said = now
            self._print(self._line())

    def _line(self) -> str:
        elapsed = max(time.monotonic() - self._since, 1e-9)
        words = [f"{self._passed} passed, {self._failed} failed"]
        if self._missing:
            causes = ", ".join(f"{count} {cause}" for cause, count in self._missing.most_common())
            words.append(f"no verdict: {causes}")
        if self._again:
            words.append(f"{self._again} made again")
        if self._tokens:
            words.append(f"{self._tokens / elapsed:.0f} tokens/s")
        words.append(f"{elapsed:.0f} s")
        if self._done:
            words.append(f"about {clock(elapsed / self._done * (self._total - self._done))} left")
        return f"{self._done}/{self._total} attempts  " + "  ".join(words)

    def _status(self) -> list[str]:
        return [f" {progress_bar(self._done, self._total)} {self._line()}"]


def show(console: Console, summary: Mapping[str, Any]) -> None:
    """Print a summary as tables."""
    _show_rates(console, summary)
    for kind, table in summary["by"].items():
        # a table in which every row is a task of its own says nothing that the list of tasks does not
        if len(table) > 1 and (kind != "family" or len(table) < summary["tasks"]):
            _show_kind(console, kind, table)
    words = ", ".join(f"{count} {reason}" for reason, count in summary["end_reasons"].items())
    if words:
        _say(console, f"ended by: {words}")
    solved, unsolved = summary["solved"], summary["unsolved"]
    if len(unsolved) < len(solved):
        _say(console, f"solved {len(solved)} of {summary['tasks']}; not solved: {_names(unsolved) or 'none'}")
    else:
        _say(console, f"solved {len(solved)} of {summary['tasks']}: {_names(solved) or 'none'}")
    if summary["without_verdict"]:
        _say(console, f"without any verdict: {_names(summary['without_verdict'])}")
    if summary["turns"] is not None:
        tokens = f"{summary['completion_tokens']} tokens sampled"
        _say(console, f"per attempt: {summary['turns']:.1f} turns, {summary['seconds']:.1f} s; {tokens}")
    if summary["retried_causes"]:
        _say(console, f"made again: {_counts(summary['retried_causes'])}")
    if summary["no_verdict"]:
        _say(console, f"no verdict: {_counts(summary['no_verdict_causes'])}")
        for error, count in summary["errors"].items():
            _say(console, f"  {count} × {error}")
    if summary["not_made"]:
        _say(console, f"not made: {summary['not_made']} attempts")
    if summary["stopped"]:
        console.print(f"[red]stopped[/] {escape(summary['stopped'])}", highlight=False, soft_wrap=True)
    _say(console, f"results: {summary['run_dir']}")


def _show_rates(console: Console, summary: Mapping[str, Any]) -> None:
    graded, tasks = summary["graded"], summary["pass_at_tasks"]
    _say(console, f"{summary['passed']} of {graded} attempts with a verdict passed ({summary['tasks']} tasks)")
    for k, rate in summary["pass_at"].items():
        _say(console, f"pass@{k}  {rate['value']:.3f}  [{rate['low']:.3f}, {rate['high']:.3f}]")
    if summary["pass_at"]:
        _say(console, f"over {tasks} tasks; {summary['interval']}")


def _show_kind(console: Console, kind: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column(kind, overflow="fold")
    most = max(len(row["pass_at"]) for row in rows.values())
    for column in ("tasks", "attempts", "pass@1", *([f"pass@{most}"] if most > 1 else []), "no verdict"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        ks = ["1", *([str(most)] if most > 1 else [])]
        rates = [f"{row['pass_at'][k]['value']:.2f}" if k in row["pass_at"] else "–" for k in ks]
        table.add_row(escape(name), str(row["tasks"]), str(row["graded"]), *rates, str(row["no_verdict"] or ""))
    console.print(table)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_TASKS} more" if len(names) > _SHOWN_TASKS else ""
    return ", ".join(names[:_SHOWN_TASKS]) + more


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
