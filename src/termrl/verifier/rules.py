"""What signals do to a reward: nothing, unless they are listed to zero it or to have it checked in a clean room."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from termrl.errors import SandboxError
from termrl.verifier.attribution import MissingVerdict
from termrl.verifier.causes import Cause
from termrl.verifier.signals import Signal
from termrl.verifier.verdict import CleanRoom, Outcome, Verdict

DEFAULT_RECHECK_ON = frozenset({Signal.PLANTED_REWARD, Signal.LD_SO_PRELOAD})
"""Signals that no honest solution gives, whatever the task."""


@dataclass(frozen=True)
class VerifyRules:
    """How verdicts are made, beyond the tests.

    Attributes:
        zero_on: signals that make a reward above 0 a zero (cause broke_verifier).
        recheck_on: signals with which a pass stands only if the tests also pass in a clean room.
        missing_verdict: ``attribute`` or ``drop``; tasks whose tests use the network are always dropped.
    """

    zero_on: frozenset[Signal] = frozenset()
    recheck_on: frozenset[Signal] = DEFAULT_RECHECK_ON
    missing_verdict: MissingVerdict = "attribute"


async def apply_rules(verdict: Verdict, rules: VerifyRules, *, clean_room: Callable[[], Awaitable[Verdict]]) -> Verdict:
    """Zero or re-check a verdict whose signals the rules list; any other comes back as it is.

    Args:
        clean_room: verifies the policy's workdir in an untouched sandbox. It may release the first sandbox. A
            :class:`~termrl.errors.SandboxError` of it is a missing verdict.

    Returns:
        Where a listed signal zeroes: 0 with cause broke_verifier. Where a pass was re-checked: the pass, or the
        clean room's verdict, with ``clean_room`` filled in. A missing verdict is never made a zero here.
    """
    if not verdict.raw_reward:
        return verdict
    zeroed = _listed(verdict, rules.zero_on)
    if zeroed:
        detail = f"the tests gave {verdict.raw_reward:g}, but for {', '.join(zeroed)} the reward is set to 0"
        return Verdict.zero(Cause.BROKE_VERIFIER, detail, **_evidence(verdict))
    rechecked = _listed(verdict, rules.recheck_on)
    if not rechecked or verdict.outcome is not Outcome.PASSED:
        return verdict
    started = time.monotonic()
    try:
        second = await clean_room()
    except SandboxError as error:
        second = Verdict.missing(Cause(error.cause), error.message)
    found = CleanRoom(outcome=second.outcome, signals=tuple(rechecked), seconds=time.monotonic() - started)
    update: dict[str, Any] = {"clean_room": found, "attempts": verdict.attempts + 1}
    if second.outcome is Outcome.PASSED:
        return verdict.model_copy(update=update)
    why = f"passed with {', '.join(rechecked)}, but not in a clean room: {second.detail or second.cause}"
    return second.model_copy(update={**update, "signals": verdict.signals, "detail": why})


def _listed(verdict: Verdict, names: frozenset[Signal]) -> list[str]:
    return sorted(str(name) for name in names if name in verdict.signals)


def _evidence(verdict: Verdict) -> dict[str, Any]:
    names = ("exit_code", "output_tail", "duration_s", "attempts", "signals", "integrity", "harness", "attribution")
    return {name: getattr(verdict, name) for name in names}
