"""Attributing a missing verdict, step by step (the sandboxes' part is in tests/environment)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from termrl.errors import SandboxStartError
from termrl.verifier.attribution import attribute
from termrl.verifier.causes import ATTRIBUTABLE_CAUSES
from termrl.verifier.verdict import INFRASTRUCTURE_CAUSES, Cause, Finding, Outcome, Verdict

CRASH = Verdict.missing(Cause.VERIFIER_CRASH, "no reward", exit_code=1, output_tail="tail")
SLOW = Verdict.missing(Cause.VERIFIER_TIMEOUT)
PASS, FAIL = Verdict.scored(1.0), Verdict.scored(0.0)


class Script:
    """Gives its verdicts in turn and counts the calls."""

    def __init__(self, *verdicts: Verdict | Exception) -> None:
        self.left = list(verdicts)
        self.calls = 0

    async def __call__(self) -> Verdict:
        self.calls += 1
        verdict = self.left.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


never: Callable[[], Awaitable[Verdict]] = Script()


@pytest.mark.parametrize("verdict", [PASS, FAIL, Verdict.zero(Cause.WALL_CAP)])
async def test_a_verdict_that_is_there_is_not_asked_about(verdict: Verdict) -> None:
    assert await attribute(verdict, again=never, fresh=never, mode="attribute") is verdict


@pytest.mark.parametrize("cause", sorted(INFRASTRUCTURE_CAUSES - ATTRIBUTABLE_CAUSES))
async def test_a_recognised_infrastructure_cause_is_never_attributed(cause: Cause) -> None:
    verdict = await attribute(Verdict.missing(cause), again=never, fresh=never, mode="attribute")
    assert (verdict.outcome, verdict.cause, verdict.attempts) == (Outcome.NO_VERDICT, cause, 1)
    assert verdict.attribution is not None and verdict.attribution.finding is Finding.INFRASTRUCTURE


def test_download_failures_and_lost_sandboxes_are_recognised_infrastructure() -> None:
    assert {Cause.VERIFIER_CRASH, Cause.VERIFIER_TIMEOUT, Cause.BAD_REWARD} == ATTRIBUTABLE_CAUSES


async def test_drop_asks_nothing() -> None:
    verdict = await attribute(CRASH, again=never, fresh=never, mode="drop")
    assert verdict.reward is None and verdict.cause is Cause.VERIFIER_CRASH
    assert verdict.attribution is not None and verdict.attribution.finding is Finding.DROPPED


@pytest.mark.parametrize("second", [PASS, FAIL])
async def test_a_verdict_of_the_second_run_in_the_same_sandbox_counts(second: Verdict) -> None:
    verdict = await attribute(CRASH, again=Script(second), fresh=never, mode="attribute")
    assert (verdict.outcome, verdict.cause, verdict.attempts) == (second.outcome, second.cause, 2)
    assert verdict.attribution is not None
    assert verdict.attribution.finding is Finding.SECOND_RUN_SCORED
    assert verdict.attribution.first_cause is Cause.VERIFIER_CRASH


async def test_a_second_run_that_loses_its_sandbox_is_infrastructure() -> None:
    again = Script(Verdict.missing(Cause.SANDBOX_LOST, "gone"))
    verdict = await attribute(CRASH, again=again, fresh=never, mode="attribute")
    assert verdict.reward is None and verdict.cause is Cause.SANDBOX_LOST


@pytest.mark.parametrize("untouched", [PASS, FAIL])
@pytest.mark.parametrize(("first", "cause"), [(CRASH, Cause.BROKE_VERIFIER), (SLOW, Cause.VERIFIER_TIMEOUT_BY_POLICY)])
async def test_missing_reward_is_attributed_to_the_policy_when_two_untouched_sandboxes_score(
    first: Verdict, cause: Cause, untouched: Verdict
) -> None:
    fresh = Script(untouched, FAIL)
    verdict = await attribute(first, again=Script(CRASH), fresh=fresh, mode="attribute")
    assert (verdict.reward, verdict.cause, verdict.attempts, fresh.calls) == (0.0, cause, 4, 2)
    assert verdict.attribution is not None
    assert (verdict.attribution.finding, verdict.attribution.extra_runs) == (Finding.UNTOUCHED_SCORED, 3)
    assert (verdict.exit_code, verdict.output_tail) == (first.exit_code, first.output_tail)


@pytest.mark.parametrize(
    ("fresh", "calls"),
    [
        (Script(CRASH), 1),
        (Script(FAIL, SLOW), 2),
        (Script(SandboxStartError("no memory")), 1),
        (Script(PASS, Verdict.missing(Cause.BOOTSTRAP_FAILED)), 2),
    ],
)
async def test_an_untouched_sandbox_without_a_verdict_leaves_the_reward_missing(fresh: Script, calls: int) -> None:
    verdict = await attribute(CRASH, again=Script(CRASH), fresh=fresh, mode="attribute")
    assert verdict.reward is None and verdict.cause is Cause.VERIFIER_CRASH
    assert fresh.calls == calls
    assert verdict.attribution is not None
    assert verdict.attribution.finding is Finding.UNTOUCHED_SILENT
    assert verdict.attempts == 2 + calls
