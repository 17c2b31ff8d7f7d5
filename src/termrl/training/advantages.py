"""From rewards to advantages, one group at a time, and the :class:`Sample` that a trainer is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from termrl.capture.segments import Segment

DeadGroup = Literal["zero_variance", "one_valid", "none_valid"]

_STD_EPSILON = 1e-6


@dataclass(frozen=True)
class Sample:
    """One episode with a verdict, ready to train on.

    Attributes:
        segments: its token sequences; several when its session branched. May hold no sampled token.
        advantage: its advantage, the same for each of its tokens.
        group: which group it belongs to (any id that is unique in the batch).
        episode: which episode of the group it is.
        truncated: a limit (length, context, turns, time) cut it; see ``mask_truncated``.
    """

    segments: tuple[Segment, ...]
    advantage: float
    group: str | int
    episode: str | int
    truncated: bool = False


def dead_group(rewards: Sequence[float | None]) -> DeadGroup | None:
    """Why a group teaches nothing, or ``None`` if it does. ``None`` rewards (no verdict) are not counted.

    A dead group's episodes are left out of the batch, so out of every denominator, and counted.
    """
    valid = [reward for reward in rewards if reward is not None]
    if not valid:
        return "none_valid"
    if len(valid) == 1:
        return "one_valid"
    return "zero_variance" if min(valid) == max(valid) else None


def group_advantages(
    rewards: Sequence[float | None], *, scale: Literal["none", "group"] = "none"
) -> list[float | None]:
    """Advantage of each episode of a group: its reward minus the mean over the group's episodes with a verdict.

    Args:
        rewards: one per episode; ``None`` where there is no verdict.
        scale: ``group`` divides by the group's population standard deviation + 1e-6 (GRPO, arXiv:2402.03300);
            ``none`` does not (Dr. GRPO, arXiv:2503.20783).

    Returns:
        One per reward, summing to 0; ``None`` stays ``None``. All 0 where :func:`dead_group` has a reason.

    Raises:
        ValueError: a reward is not finite.
    """
    valid = [reward for reward in rewards if reward is not None]
    if any(not math.isfinite(reward) for reward in valid):
        raise ValueError("rewards must be finite")
    if dead_group(rewards) is not None:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(valid) / len(valid)
    divisor = 1.0
    if scale == "group":
        divisor = math.sqrt(math.fsum((reward - mean) ** 2 for reward in valid) / len(valid)) + _STD_EPSILON
    return [None if reward is None else (reward - mean) / divisor for reward in rewards]
