"""What a task's attempts show: one status, the line that says why, and the end of the log that tells most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from termrl.tasks.folder import entries
from termrl.tasks.load import cannot_pass
from termrl.tasks.task import Task
from termrl.validation.records import Attempt, Status, TaskReport
from termrl.verifier.causes import ATTRIBUTABLE_CAUSES, Cause
from termrl.verifier.verdict import Outcome

LOG_CHARS = 4000

_UNKNOWN = {Cause.BOOTSTRAP_FAILED: Status.BOOTSTRAP_FAILED, Cause.IMAGE_UNAVAILABLE: Status.IMAGE_UNAVAILABLE}


def judge(task: Task, attempts: Sequence[Attempt]) -> TaskReport:
    """The report of one task. ``attempts`` are all of it, in any order.

    A verdict against the task counts whatever else went wrong; that it is sound takes a verdict of every attempt.
    """
    ordered = sorted(attempts, key=lambda attempt: (attempt.kind, attempt.round))
    oracle, nop = ([a for a in ordered if a.kind == kind] for kind in ("oracle", "nop"))
    status, detail, telling = _verdict(task, oracle, nop)
    timed = oracle or nop
    return TaskReport(
        status=status,
        digest=task.digest,
        detail=detail,
        oracle=_rewards(oracle),
        nop=_rewards(nop),
        solution_exit_codes=tuple(a.solved.exit_code for a in oracle if a.solved is not None),
        causes=dict(Counter(str(a.verdict.cause) for a in ordered if a.verdict is not None and not a.scored)),
        retries=sum(len(a.retried) for a in ordered),
        start_s=_mean(a.start_s for a in timed),
        solve_s=_mean(a.solve_s for a in timed),
        verify_s=_mean(a.verify_s for a in timed),
        size_bytes=sum(path.stat().st_size for _, path in entries(task.path) if path.is_file()),
        log_tail="" if telling is None else _log(telling),
    )


def _verdict(task: Task, oracle: list[Attempt], nop: list[Attempt]) -> tuple[Status, str, Attempt | None]:
    refused = next((a for a in (*oracle, *nop) if a.refusal), None)
    if refused is not None:
        return Status.REFUSED, refused.refusal, None
    passed, failed = _with(nop, Outcome.PASSED), _with(nop, Outcome.FAILED)
    if passed and failed:
        return Status.FLAKY, f"passes untouched {_times(passed, nop)}", passed[0]
    if passed:
        return Status.PASSES_UNTOUCHED, "the tests pass although nothing was done", passed[0]
    silent = _silent(nop)
    if silent and failed:
        return Status.FLAKY, f"no verdict untouched {_times(silent, nop)}: {_why(silent[0])}", silent[0]
    passed, failed = _with(oracle, Outcome.PASSED), _with(oracle, Outcome.FAILED)
    if (passed or _silent(oracle)) and failed:
        return Status.FLAKY, f"the solution fails {_times(failed, oracle)}", failed[0]
    if passed and _silent(oracle):
        silent = _silent(oracle)
        return Status.FLAKY, f"no verdict after the solution {_times(silent, oracle)}: {_why(silent[0])}", silent[0]
    reasons = cannot_pass(task.tests)
    if (failed or _silent(oracle)) and reasons:
        return Status.TESTS_CANNOT_PASS, "; ".join(reasons), (failed or _silent(oracle))[0]
    if failed:
        return Status.ORACLE_FAILS, _oracle_fails(failed[0]), failed[0]
    silent = _silent(oracle) or _silent(nop)
    if silent:
        where = "after the solution" if silent[0].kind == "oracle" else "untouched"
        return Status.NO_TEST_VERDICT, f"{where}: {_why(silent[0])}", silent[0]
    for attempt in (*oracle, *nop):
        if not attempt.scored and attempt.verdict is not None and attempt.verdict.cause is not None:
            status = _UNKNOWN.get(attempt.verdict.cause, Status.INFRASTRUCTURE)
            return status, _why(attempt), attempt
    if task.solution is None:
        return Status.NO_SOLUTION, "no solution/solve.sh: only that nothing scores 0 could be tried", None
    return Status.SOUND, "", None


def _oracle_fails(attempt: Attempt) -> str:
    reward = attempt.verdict.raw_reward if attempt.verdict is not None else None
    ended = attempt.solved
    how = ""
    if ended is not None and ended.timed_out:
        how = ", which was cut by its time limit"
    elif ended is not None and ended.exit_code:
        how = f", which ended with exit status {ended.exit_code}"
    return f"the tests give {reward or 0:g} after the solution{how}"


def _why(attempt: Attempt) -> str:
    assert attempt.verdict is not None
    return f"{attempt.verdict.cause}: {attempt.verdict.detail}".removesuffix(": ")


def _with(attempts: Iterable[Attempt], outcome: Outcome) -> list[Attempt]:
    return [a for a in attempts if a.verdict is not None and a.verdict.outcome is outcome]


def _silent(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Attempts whose tests ended without a verdict, by their own doing as far as anyone can tell."""
    return [a for a in attempts if a.verdict is not None and a.verdict.cause in ATTRIBUTABLE_CAUSES]


def _times(some: Sequence[Attempt], all_of_them: Sequence[Attempt]) -> str:
    return f"{len(some)} of {len(all_of_them)} times"


def _rewards(attempts: Sequence[Attempt]) -> tuple[float | None, ...]:
    return tuple(a.verdict.raw_reward if a.verdict is not None else None for a in attempts)


def _log(attempt: Attempt) -> str:
    """What the tests printed, else what the solution did; the solution comes first where it ended badly."""
    verdict = attempt.verdict.output_tail.strip() if attempt.verdict is not None else ""
    solved = attempt.solved
    if solved is not None and (solved.exit_code != 0 or not verdict) and solved.output_tail.strip():
        ended = "cut" if solved.timed_out else f"exit status {solved.exit_code}"
        half = LOG_CHARS // 2
        return f"solve.sh ({ended}):\n{solved.output_tail.strip()[-half:]}\n\ntest.sh:\n{verdict[-half:]}".strip()
    return verdict[-LOG_CHARS:]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return round(sum(found) / len(found), 4) if found else 0.0
