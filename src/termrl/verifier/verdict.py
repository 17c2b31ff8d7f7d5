"""The nouns of scoring: :class:`Outcome` and :class:`Verdict`; the closed lists that they use are in ``causes``.

What maps (end reason, verdict) to a reward is :func:`termrl.verifier.outcomes.reward_of`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from termrl.verifier.causes import INFRASTRUCTURE_CAUSES, POLICY_CAUSES, Cause, EndReason

__all__ = [
    "HARNESS",
    "INFRASTRUCTURE_CAUSES",
    "POLICY_CAUSES",
    "Attribution",
    "Cause",
    "CleanRoom",
    "EndReason",
    "Finding",
    "Outcome",
    "Verdict",
]


class Outcome(StrEnum):
    """What the tests said."""

    PASSED = "passed"
    FAILED = "failed"
    NO_VERDICT = "no_verdict"


HARNESS = "tests/test.sh"


class Finding(StrEnum):
    """How a missing verdict was attributed (the steps of :func:`termrl.verifier.attribution.attribute`)."""

    INFRASTRUCTURE = "infrastructure"
    """A recognised infrastructure cause: never attributed."""
    DROPPED = "dropped"
    """``missing_verdict = drop``: not asked."""
    SECOND_RUN_SCORED = "second_run_scored"
    """The same sandbox gave a verdict the second time; that one counts."""
    UNTOUCHED_SCORED = "untouched_scored"
    """Two untouched sandboxes gave verdicts: the policy broke its verifier."""
    UNTOUCHED_SILENT = "untouched_silent"
    """An untouched sandbox gave no verdict either: nobody knows, so no reward."""


class Attribution(BaseModel):
    """What asking for the reason of a missing verdict found and cost.

    Attributes:
        first_cause: the cause that the first verify run gave.
        extra_runs: verify runs beyond the first; ``seconds``: the time they took, sandboxes included.
    """

    model_config = ConfigDict(frozen=True)

    finding: Finding
    first_cause: Cause
    extra_runs: int = 0
    seconds: float = 0.0


class CleanRoom(BaseModel):
    """What the tests said of the policy's workdir in an untouched sandbox.

    Attributes:
        signals: the names that asked for it; ``seconds``: the time it took, sandbox included.
    """

    model_config = ConfigDict(frozen=True)

    outcome: Outcome
    signals: tuple[str, ...] = ()
    seconds: float = 0.0


class Verdict(BaseModel):
    """What the task's tests said about one sandbox, with the cause and the evidence.

    Attributes:
        outcome: passed (reward 1), failed (0) or no_verdict (``None``).
        cause: why; ``None`` only when passed.
        raw_reward: the number that the tests wrote, in [0, 1]; ``None`` without a verdict.
        exit_code: exit status of test.sh (diagnosis only, it decides nothing).
        output_tail: the last part of test.sh's output.
        detail: one line for a person, such as why a reward file was refused.
        duration_s: seconds from the first verify action to the verdict.
        attempts: how many times tests were run to come to this verdict.
        signals: tamper signals (name → evidence; the names are those of :class:`termrl.verifier.signals.Signal`).
        integrity: ``sealed`` if tests were absent while the agent acted, ``exposed`` if it could read them.
        attribution: how a missing verdict was looked into, and the cost; ``None`` when the first run gave one.
        clean_room: how a pass with signals was re-checked; ``None`` where it was not.

    Raises:
        ValueError: an outcome with a cause or raw reward that contradicts it (so that a zero for an
            infrastructure cause cannot be written down).
    """

    model_config = ConfigDict(frozen=True)

    outcome: Outcome
    cause: Cause | None = None
    raw_reward: float | None = None
    exit_code: int | None = None
    output_tail: str = ""
    detail: str = ""
    duration_s: float = 0.0
    attempts: int = 1
    signals: dict[str, Any] = {}
    integrity: Literal["sealed", "exposed"] = "sealed"
    harness: str = HARNESS
    attribution: Attribution | None = None
    clean_room: CleanRoom | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Verdict:
        if self.raw_reward is not None and not 0.0 <= self.raw_reward <= 1.0:
            raise ValueError(f"raw_reward {self.raw_reward} is outside [0, 1]")
        if self.outcome is Outcome.PASSED:
            consistent = self.cause is None and self.raw_reward in (None, 1.0)
        elif self.outcome is Outcome.FAILED:
            consistent = self.cause in POLICY_CAUSES and self.raw_reward != 1.0
        else:
            consistent = self.cause in INFRASTRUCTURE_CAUSES and self.raw_reward is None
        if not consistent:
            raise ValueError(f"{self.outcome} contradicts cause {self.cause} with raw reward {self.raw_reward}")
        return self

    @property
    def reward(self) -> float | None:
        """1.0, 0.0 or ``None`` (binary; see :func:`termrl.verifier.outcomes.reward_of` for raw rewards)."""
        if self.outcome is Outcome.PASSED:
            return 1.0
        if self.outcome is Outcome.FAILED:
            return 0.0
        return None

    @classmethod
    def scored(cls, raw_reward: float, **evidence: Any) -> Verdict:
        """What the tests wrote: passed exactly when ``raw_reward`` is 1, else failed (a fraction is kept raw).

        Raises:
            ValueError: ``raw_reward`` is outside [0, 1] or not a number.
        """
        if raw_reward == 1.0:
            return cls(outcome=Outcome.PASSED, raw_reward=1.0, **evidence)
        return cls(outcome=Outcome.FAILED, cause=Cause.TESTS_FAILED, raw_reward=raw_reward, **evidence)

    @classmethod
    def missing(cls, cause: Cause, detail: str = "", **evidence: Any) -> Verdict:
        """No verdict, for an infrastructure ``cause``."""
        return cls(outcome=Outcome.NO_VERDICT, cause=cause, detail=detail, **evidence)

    @classmethod
    def zero(cls, cause: Cause, detail: str = "", **evidence: Any) -> Verdict:
        """A zero that the policy earned, for one of :data:`POLICY_CAUSES`."""
        if cause not in POLICY_CAUSES:
            raise ValueError(f"{cause} is an infrastructure cause: it can never give a zero")
        return cls(outcome=Outcome.FAILED, cause=cause, detail=detail, **evidence)
