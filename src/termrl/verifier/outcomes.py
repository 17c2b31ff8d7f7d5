"""From (end reason, verdict) to a reward, by the tables of :mod:`termrl.verifier.causes`."""

from __future__ import annotations

from termrl.verifier.causes import END_REASONS, EndReason, Rule
from termrl.verifier.verdict import Outcome, Verdict


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
    rule = END_REASONS[end_reason].rule
    if rule is Rule.NEVER:
        return None
    if verdict is not None and verdict.outcome is Outcome.NO_VERDICT:
        return None
    if rule is Rule.CUT and not graded_cut:
        return 0.0
    if verdict is None:
        return None
    if raw and verdict.raw_reward is not None:
        return verdict.raw_reward
    return verdict.reward
