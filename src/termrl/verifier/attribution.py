"""Whose fault a missing verdict is: asked of the sandboxes, never guessed.

(a) A recognised infrastructure cause stays without a reward. (b) Else the tests run once more in the same
sandbox, and a verdict there counts. (c) Else they run in two untouched sandboxes of the task: if both give a
verdict, the policy broke its verifier and gets 0. (d) Else nobody knows, and there is no reward.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Literal

from termrl.errors import SandboxError
from termrl.verifier.causes import ATTRIBUTABLE_CAUSES, Cause
from termrl.verifier.verdict import Attribution, Finding, Outcome, Verdict

MissingVerdict = Literal["attribute", "drop"]

UNTOUCHED_RUNS = 2


async def attribute(
    verdict: Verdict,
    *,
    again: Callable[[], Awaitable[Verdict]],
    fresh: Callable[[], Awaitable[Verdict]],
    mode: MissingVerdict,
) -> Verdict:
    """Turn a missing verdict into one that says whose it is; a verdict that is there comes back as it is.

    Args:
        again: verifies once more in the same sandbox.
        fresh: verifies in an untouched sandbox of the task. It is called only after ``again`` found nothing,
            so it may release the first sandbox before it takes another.
        mode: ``drop`` asks nothing: every missing verdict stays without a reward.

    Returns:
        The verdict with ``attribution`` (finding, extra verify runs, their seconds) and ``attempts`` filled in. A
        zero has cause verifier_timeout_by_policy where the first run timed out, else broke_verifier.
    """
    if verdict.outcome is not Outcome.NO_VERDICT or verdict.cause is None:
        return verdict
    cause, started, runs = verdict.cause, time.monotonic(), 0

    def found(finding: Finding, outcome: Verdict, detail: str) -> Verdict:
        cost = Attribution(finding=finding, first_cause=cause, extra_runs=runs, seconds=time.monotonic() - started)
        update = {"attribution": cost, "attempts": verdict.attempts + runs, "detail": detail}
        return outcome.model_copy(update=update)

    if cause not in ATTRIBUTABLE_CAUSES:
        return found(Finding.INFRASTRUCTURE, verdict, verdict.detail)
    if mode == "drop":
        return found(Finding.DROPPED, verdict, verdict.detail)

    runs += 1
    second = await _run(again)
    if second.outcome is not Outcome.NO_VERDICT:
        return found(Finding.SECOND_RUN_SCORED, second, f"second run in the same sandbox, after: {verdict.detail}")
    if second.cause not in ATTRIBUTABLE_CAUSES:
        return found(Finding.INFRASTRUCTURE, second, f"{second.detail} (second run, after {cause}: {verdict.detail})")

    for _ in range(UNTOUCHED_RUNS):
        runs += 1
        untouched = await _run(fresh)
        if untouched.outcome is Outcome.NO_VERDICT:
            detail = f"{verdict.detail}; an untouched sandbox gave none either ({untouched.cause}: {untouched.detail})"
            return found(Finding.UNTOUCHED_SILENT, verdict, detail)
    timed_out = cause is Cause.VERIFIER_TIMEOUT
    blamed = Verdict.zero(
        Cause.VERIFIER_TIMEOUT_BY_POLICY if timed_out else Cause.BROKE_VERIFIER,
        **verdict.model_dump(include={"exit_code", "output_tail", "duration_s", "signals", "integrity", "harness"}),
    )
    return found(Finding.UNTOUCHED_SCORED, blamed, f"{verdict.detail}; {UNTOUCHED_RUNS} untouched sandboxes scored")


async def _run(verify: Callable[[], Awaitable[Verdict]]) -> Verdict:
    """A sandbox that fails under an extra run is an answer about the infrastructure, not an error of the episode."""
    try:
        return await verify()
    except SandboxError as error:
        return Verdict.missing(Cause(error.cause), error.message)
