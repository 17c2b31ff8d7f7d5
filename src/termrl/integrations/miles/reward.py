"""The reward function: what the tests said, or a sample that miles must drop."""

from __future__ import annotations

import math
from typing import Any

from termrl.integrations.miles.report import TALLY


async def reward_func(args: Any, samples: Any, **kwargs: Any) -> float | list[float | None] | None:
    """The rewards of a sample, or of a list of them.

    A sample without a verdict is marked as aborted and has no reward: ``None``, as miles' own aborted samples have.
    With ``check_no_aborted`` (or ``keep_group``) as filter its whole group is dropped; without one miles stops at the
    ``None`` rather than train on it as a 0.
    """
    if isinstance(samples, list):
        return [_reward(sample) for sample in samples]
    return _reward(samples)


def _reward(sample: Any) -> float | None:
    reward = reward_in(sample.metadata)
    if reward is None:
        sample.status = type(sample).Status.ABORTED
        TALLY.unscored += 1
    return reward


def reward_in(metadata: Any) -> float | None:
    """The reward that the agent function left in a sample's metadata; ``None`` for all that is no number in [0, 1]."""
    reward = metadata.get("reward") if isinstance(metadata, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return None
    return float(reward) if math.isfinite(reward) and 0.0 <= reward <= 1.0 else None
