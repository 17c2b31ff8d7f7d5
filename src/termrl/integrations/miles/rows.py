"""Prompt data for miles: one JSON line for each task, with the messages before its instruction and its id."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from termrl.agent.types import Opening
from termrl.errors import TaskError
from termrl.runs.files import read_jsonl, write_atomically
from termrl.tasks.task import Task

RESULTS = "results.jsonl"
Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Band:
    """Pass rates, both ends included, in which a group of samples is likely to differ in reward."""

    low: float
    high: float

    @classmethod
    def of(cls, text: str) -> Band:
        """Read ``LOW-HIGH``.

        Raises:
            TaskError: it is not two numbers in [0, 1], the smaller first.
        """
        low, _, high = text.partition("-")
        try:
            band = cls(float(low), float(high))
        except ValueError:
            raise TaskError(f"--band {text}: give it as 0.1-0.9") from None
        if not 0.0 <= band.low <= band.high <= 1.0:
            raise TaskError(f"--band {text}: must be two pass rates in [0, 1], the smaller first")
        return band

    def holds(self, rate: float) -> bool:
        """Whether a pass rate lies in it."""
        return self.low <= rate <= self.high


@dataclass(frozen=True)
class Choice:
    """The tasks that get a row, and why each of the others does not, by id."""

    tasks: tuple[Task, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def choose(
    tasks: Mapping[str, Task],
    *,
    split: Split | None = None,
    eval_share: float = 0.2,
    unsound: Mapping[str, str] | None = None,
    band: Band | None = None,
    rates: Mapping[str, float] | None = None,
    n: int | None = None,
) -> Choice:
    """Choose among ``tasks``, in their order.

    Args:
        split: only this part. A task belongs to the part that its ``[metadata] split`` names; where it names none, to
            ``eval`` by a hash of its id with probability ``eval_share``, whatever other tasks there are.
        unsound: tasks that are not to be trained on, and why.
        band, rates: only tasks whose measured pass rate lies in the band; without a rate a task is left out.
        n: only the first so many of those that are left.
    """
    chosen: list[Task] = []
    left_out: dict[str, str] = {}
    for task in tasks.values():
        if split is not None and split_of(task, eval_share) != split:
            continue
        why = (unsound or {}).get(task.id, "") or _outside(band, (rates or {}).get(task.id))
        if why:
            left_out[task.id] = why
        else:
            chosen.append(task)
    return Choice(tuple(chosen[:n]), left_out)


def split_of(task: Task, eval_share: float) -> str:
    """The part that a task belongs to; see :func:`choose`."""
    named = str(task.metadata.get("split", ""))
    if named:
        return named
    drawn = int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=8).digest(), "big") / 2**64
    return "eval" if drawn < eval_share else "train"


def pass_rates(path: Path) -> dict[str, float]:
    """The pass rate of each task that an evaluation measured: passes over episodes with a verdict.

    Args:
        path: its ``results.jsonl`` or run folder. Of several lines for one sample the last verdict counts.

    Raises:
        TaskError: no such file, or lines that are no results.
    """
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise TaskError(f"{file}: no such file", hint="termrl eval TASKS -o RUN writes one")
    verdicts: dict[tuple[str, object], bool] = {}
    try:
        for number, line in enumerate(read_jsonl(file)):
            if line["reward"] is not None:
                verdicts[str(line["task_id"]), line.get("sample", number)] = float(line["reward"]) >= 1.0
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{file}: not results of termrl eval: {type(error).__name__}: {error}") from None
    by_task: dict[str, list[bool]] = {}
    for (task_id, _), passed in verdicts.items():
        by_task.setdefault(task_id, []).append(passed)
    return {task_id: sum(passed) / len(passed) for task_id, passed in by_task.items()}


def write_rows(path: Path, tasks: Sequence[Task], opening: Opening) -> None:
    """Replace the prompt data at ``path``.

    Raises:
        TaskError: it cannot be written.
    """
    try:
        write_atomically(path, b"".join(map(_line, rows(tasks, opening))))
    except OSError as error:
        raise TaskError(f"{path}: cannot be written: {error.strerror or error}") from None


def rows(tasks: Sequence[Task], opening: Opening) -> Iterator[dict[str, Any]]:
    """What miles reads with ``--input-key prompt --metadata-key metadata``; the instruction comes at each reset."""
    for task in tasks:
        yield {"prompt": list(opening.messages), "metadata": {"task_id": task.id}}


def _outside(band: Band | None, rate: float | None) -> str:
    if band is None:
        return ""
    if rate is None:
        return "not measured"
    return "" if band.holds(rate) else f"pass rate {rate:.3g} is outside {band.low:g}-{band.high:g}"


def _line(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
