"""The summary of an evaluation: rates with their certainty, by task and by kind of task, and what had no verdict."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from termrl.evaluation.pass_at_k import INTERVAL, estimates
from termrl.evaluation.results import Result
from termrl.rollout.groups import UNKNOWN_CAUSE
from termrl.runs.metrics import EvalScores, FamilyScore

_KINDS: dict[str, Callable[[Result], Iterable[str]]] = {
    "family": lambda result: (result.family,),
    "level": lambda result: () if result.level is None else (str(result.level),),
    "difficulty": lambda result: (result.difficulty,) if result.difficulty else (),
    "category": lambda result: (result.category,) if result.category else (),
    "tag": lambda result: result.tags,
}


def summarise(results: Iterable[Result], *, tasks: Sequence[str], samples: int) -> dict[str, Any]:
    """The figures of ``summary.json`` that follow from the results.

    An attempt without a verdict is in no rate: it is counted apart, by cause, as is one that has not been made.

    Args:
        results: at most one for each attempt.
        tasks: ids of all tasks; ``samples``: attempts wanted at each.
    """
    found = sorted(results, key=lambda result: result.key)
    graded = [result for result in found if result.reward is not None]
    missing = [result for result in found if result.reward is None]
    per_task = _per_task(found)
    rates = _rates(found)
    return {
        "tasks": len(tasks),
        "samples": samples,
        "wanted": len(tasks) * samples,
        "episodes": len(found),
        "graded": len(graded),
        "passed": sum(_passed(result) for result in graded),
        "no_verdict": len(missing),
        "not_made": len(tasks) * samples - len(found),
        "pass_at": rates,
        "pass_at_tasks": sum(counts["graded"] > 0 for counts in per_task.values()),
        "interval": INTERVAL,
        "solved": [name for name, counts in per_task.items() if counts["passed"]],
        "unsolved": [name for name, counts in per_task.items() if counts["graded"] and not counts["passed"]],
        "without_verdict": [name for name in sorted(tasks) if not per_task.get(name, {}).get("graded")],
        "by": {kind: table for kind, of in _KINDS.items() if (table := _by(found, of))},
        "by_task": per_task,
        "end_reasons": _counts(result.end_reason for result in found),
        "no_verdict_causes": _counts(result.cause or UNKNOWN_CAUSE for result in missing),
        "zero_causes": _counts(result.cause or UNKNOWN_CAUSE for result in graded if not _passed(result)),
        "retried_causes": _counts(cause for result in found for cause in result.lost),
        "errors": _errors(missing),
        "turns": _mean(result.turns for result in graded),
        "seconds": _mean(result.seconds for result in graded),
        "prompt_tokens": sum(result.prompt_tokens for result in found),
        "completion_tokens": sum(result.completion_tokens for result in found),
    }


def scores(results: Iterable[Result]) -> EvalScores:
    """The same as trackers take it."""
    found = list(results)
    families: dict[str, FamilyScore] = {}
    for family in sorted({result.family for result in found}):
        of_family = [result for result in found if result.family == family]
        graded = [result for result in of_family if result.reward is not None]
        passed = sum(_passed(result) for result in graded)
        families[family] = FamilyScore(passed, len(graded), len(of_family) - len(graded))
    dropped = Counter(result.cause or UNKNOWN_CAUSE for result in found if result.reward is None)
    rates = {int(k): value["value"] for k, value in _rates(found).items()}
    return EvalScores(families, frozenset(), dict(dropped), rates)


def _passed(result: Result) -> bool:
    return result.reward is not None and result.reward >= 1.0


def _per_task(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    """Attempts of each task: with a verdict, passed, without a verdict."""
    table: dict[str, dict[str, int]] = {}
    for result in results:
        counts = table.setdefault(result.task_id, {"graded": 0, "passed": 0, "no_verdict": 0})
        counts["graded" if result.reward is not None else "no_verdict"] += 1
        counts["passed"] += _passed(result)
    return table


def _rates(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """k → pass@k with its interval (keys are text, as in JSON)."""
    found = estimates([(counts["graded"], counts["passed"]) for counts in _per_task(results).values()])
    return {str(k): asdict(estimate) for k, estimate in found.items()}


def _by(results: Sequence[Result], of: Callable[[Result], Iterable[str]]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        for name in of(result):
            groups[name].append(result)
    return {
        name: {
            "tasks": len({result.task_id for result in group}),
            "graded": sum(result.reward is not None for result in group),
            "no_verdict": sum(result.reward is None for result in group),
            "pass_at": _rates(group),
        }
        for name, group in sorted(groups.items())
    }


def _errors(missing: Sequence[Result]) -> dict[str, int]:
    """The errors of attempts without a verdict, the most frequent first."""
    counts = Counter(f"{result.cause or UNKNOWN_CAUSE}: {result.error}".strip(": ") for result in missing)
    return dict(counts.most_common(10))


def _counts(names: Iterable[str]) -> Mapping[str, int]:
    return dict(sorted(Counter(names).items()))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(math.fsum(found) / len(found), 3) if found else None
