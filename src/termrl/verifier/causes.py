"""The closed lists of end reasons and causes, as one table each: what it means, and what it can give.

1 comes only from the task's tests. 0 comes only from the tests or from a cause whose row says so. All else is
``None``: the episode leaves the batch, its group's baseline and every denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from types import MappingProxyType


class EndReason(StrEnum):
    """Why an episode stopped (closed list; each row of :data:`END_REASONS`)."""

    TASK_COMPLETE = "task_complete"
    NO_COMMAND = "no_command"
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    CONTEXT = "context"
    TIMEOUT = "timeout"
    POLICY_ERROR = "policy_error"
    ENVIRONMENT_ERROR = "environment_error"
    ABORTED = "aborted"


class Cause(StrEnum):
    """Why a verdict is what it is (closed list; each row of :data:`CAUSES`)."""

    SANDBOX_START = "sandbox_start"
    SANDBOX_LOST = "sandbox_lost"
    ENVIRONMENT_LOST = "environment_lost"
    CAPACITY = "capacity"
    ENGINE_ERROR = "engine_error"
    IMAGE_UNAVAILABLE = "image_unavailable"
    BOOTSTRAP_FAILED = "bootstrap_failed"
    VERIFIER_CRASH = "verifier_crash"
    VERIFIER_TIMEOUT = "verifier_timeout"
    BAD_REWARD = "bad_reward"
    CANCELLED = "cancelled"
    TESTS_FAILED = "tests_failed"
    BROKE_VERIFIER = "broke_verifier"
    WALL_CAP = "wall_cap"
    VERIFIER_TIMEOUT_BY_POLICY = "verifier_timeout_by_policy"


class Rule(Enum):
    """What an end reason does to the reward."""

    GRADED = auto()
    """The verdict decides."""
    CUT = auto()
    """Zero in training (the wall cap); the verdict decides where cut episodes are graded."""
    NEVER = auto()
    """No reward, whatever a verdict says."""


@dataclass(frozen=True)
class EndReasonRow:
    """One end reason: what it does to the reward, and what it means."""

    rule: Rule
    meaning: str


@dataclass(frozen=True)
class CauseRow:
    """One cause.

    Attributes:
        reward: 0.0, or ``None`` for no verdict.
        meaning: one line.
        attributed: a policy could have brought it about, so sandboxes are asked before the reward stays missing.
        replayed: the environment went, not the policy: a scheduler may play the whole episode again.
    """

    reward: float | None
    meaning: str
    attributed: bool = False
    replayed: bool = False


END_REASONS = MappingProxyType(
    {
        EndReason.TASK_COMPLETE: EndReasonRow(Rule.GRADED, "the policy said that it is done"),
        EndReason.NO_COMMAND: EndReasonRow(Rule.GRADED, "too many replies held no command that could be run"),
        EndReason.MAX_TURNS: EndReasonRow(Rule.GRADED, "the last turn was used up"),
        EndReason.LENGTH: EndReasonRow(Rule.GRADED, "a reply was cut at the turn's token limit, and not run"),
        EndReason.CONTEXT: EndReasonRow(Rule.GRADED, "the context window has no room for another turn"),
        EndReason.TIMEOUT: EndReasonRow(Rule.CUT, "the wall cap of engine service and commands was reached"),
        EndReason.POLICY_ERROR: EndReasonRow(Rule.NEVER, "the policy's endpoint failed"),
        EndReason.ENVIRONMENT_ERROR: EndReasonRow(Rule.NEVER, "the sandbox or the environment failed"),
        EndReason.ABORTED: EndReasonRow(Rule.NEVER, "the engine or the caller aborted the episode"),
    }
)

CAUSES = MappingProxyType(
    {
        Cause.SANDBOX_START: CauseRow(None, "the sandbox could not be started", replayed=True),
        Cause.SANDBOX_LOST: CauseRow(None, "the sandbox died or stopped answering", replayed=True),
        Cause.ENVIRONMENT_LOST: CauseRow(
            None, "the environment failed in any other way, or has no episode", replayed=True
        ),
        Cause.CAPACITY: CauseRow(None, "the environment server had no free slot in time", replayed=True),
        Cause.ENGINE_ERROR: CauseRow(None, "the policy's endpoint failed"),
        Cause.IMAGE_UNAVAILABLE: CauseRow(None, "the task's image could not be pulled or built"),
        Cause.BOOTSTRAP_FAILED: CauseRow(None, "the tests could not download or install what they need"),
        Cause.VERIFIER_CRASH: CauseRow(None, "the tests ended without a reward", attributed=True),
        Cause.VERIFIER_TIMEOUT: CauseRow(None, "the tests took longer than their budget", attributed=True),
        Cause.BAD_REWARD: CauseRow(None, "the tests wrote what is no reward in [0, 1]", attributed=True),
        Cause.CANCELLED: CauseRow(None, "the engine aborted a turn"),
        Cause.TESTS_FAILED: CauseRow(0.0, "the tests wrote less than 1"),
        Cause.BROKE_VERIFIER: CauseRow(
            0.0, "no reward here but in untouched sandboxes, or a tamper signal that is set to zero rewards"
        ),
        Cause.WALL_CAP: CauseRow(0.0, "cut by the wall cap in training"),
        Cause.VERIFIER_TIMEOUT_BY_POLICY: CauseRow(0.0, "the tests time out here but not in untouched sandboxes"),
    }
)

POLICY_CAUSES = frozenset(cause for cause, row in CAUSES.items() if row.reward is not None)
"""Causes that give 0."""

INFRASTRUCTURE_CAUSES = frozenset(cause for cause, row in CAUSES.items() if row.reward is None)
"""Causes that give ``None``."""

ATTRIBUTABLE_CAUSES = frozenset(cause for cause, row in CAUSES.items() if row.attributed)
"""Causes of a missing verdict that a policy could have brought about; all others are infrastructure's."""

REPLAYED_CAUSES = frozenset(cause for cause, row in CAUSES.items() if row.replayed)
"""Causes after which a whole episode may be played again (``rollout.retries``)."""
