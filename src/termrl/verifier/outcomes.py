"""The one table that maps (end reason, verdict) to a reward."""

from __future__ import annotations

from enum import Enum, auto
from types import MappingProxyType

from termrl.verifier.verdict import EndReason, Outcome, Verdict


class _Rule(Enum):
    GRADED = auto()
    """The verdict decides."""
    CUT = auto()
    """Zero in training (the wall cap); the verdict decides where cut episodes are graded."""
    NEVER = auto()
    """No reward, whatever a verdict says."""


_TABLE = MappingProxyType(
    {
        EndReason.TASK_COMPLETE: _Rule.GRADED,
        EndReason.NO_COMMAND: _Rule.GRADED,
        EndReason.MAX_TURNS: _Rule.GRADED,
        EndReason.LENGTH: _Rule.GRADED,
        EndReason.CONTEXT: _Rule.GRADED,
        EndReason.TIMEOUT: _Rule.CUT,
        EndReason.POLICY_ERROR: _Rule.NEVER,
        EndReason.ENVIRONMENT_ERROR: _Rule.NEVER,
        EndReason.ABORTED: _Rule.NEVER,
    }
)


def reward_of(end_reason: EndReason, verdict: Verdict | None, *, graded_cut: bool, raw: bool = False) -> float | None:
    """The reward of one episode: 1 only from passed tests, 0 only from failed ones or a listed policy cause.

    ========================================  =================================  =========================
    end reason                                verdict                            reward
    ========================================  =================================  =========================
    task_complete, no_command, max_turns,     passed / failed                    1 / 0 (``raw``: as written)
    length, context
    the same                                  no_verdict, or not verified        ``None``
    timeout, ``graded_cut``                   any                                as above
    timeout, not ``graded_cut``               any but no_verdict (cause          0 (wall cap)
                                              wall_cap; or not verified)
    timeout, not ``graded_cut``               no_verdict                         ``None``
    policy_error, environment_error, aborted  any                                ``None``
    ========================================  =================================  =========================

    Args:
        verdict: ``None`` when the tests were not run.
        graded_cut: an episode cut by the wall cap is graded by its tests (evaluation, golden validation)
            rather than scored 0 (training).
        raw: give the number that the tests wrote, in [0, 1], rather than 0 or 1.
    """
    rule = _TABLE[end_reason]
    if rule is _Rule.NEVER:
        return None
    if verdict is not None and verdict.outcome is Outcome.NO_VERDICT:
        return None
    if rule is _Rule.CUT and not graded_cut:
        return 0.0
    if verdict is None:
        return None
    if raw and verdict.raw_reward is not None:
        return verdict.raw_reward
    return verdict.reward
