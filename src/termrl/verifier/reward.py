"""Reading the number that a task's tests wrote: ``reward.json`` before ``reward.txt``.

The format is Harbor's: ``reward.json`` is an object of finite numbers, ``reward.txt`` one finite decimal number.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_REWARD_BYTES = 4096

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class RewardFormatError(ValueError):
    """A reward file that says no usable number; the message says why, in one line."""


def parse_reward_json(data: bytes) -> float:
    """The reward in ``reward.json``: its key ``reward``, else its only key.

    Raises:
        RewardFormatError: not an object of finite numbers, several keys without ``reward``, or outside [0, 1].
    """
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RewardFormatError(f"reward.json cannot be parsed: {str(error)[:120]}") from None
    if not isinstance(found, dict) or not found:
        raise RewardFormatError("reward.json is not an object with at least one key")
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RewardFormatError(f"reward.json: {key[:40]!r} is not a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise RewardFormatError(f"reward.json: {key[:40]!r} is not finite")
    if "reward" in found:
        value = found["reward"]
    elif len(found) == 1:
        (value,) = found.values()
    else:
        raise RewardFormatError("reward.json has several keys and none of them is 'reward'")
    return _in_range(value, "reward.json")


def parse_reward_txt(data: bytes) -> float:
    """The reward in ``reward.txt``, one decimal number with white space around it at most.

    Raises:
        RewardFormatError: empty, not a finite number, or outside [0, 1].
    """
    text = data.decode("utf-8", "replace").strip()
    if not text:
        raise RewardFormatError("reward.txt is empty")
    if not _NUMBER.fullmatch(text):
        raise RewardFormatError(f"reward.txt does not hold a finite number: {text[:60]!r}")
    return _in_range(float(text), "reward.txt")


def _in_range(value: int | float, name: str) -> float:
    if not 0 <= value <= 1:
        raise RewardFormatError(f"{name}: {value!r:.40} is outside [0, 1]")
    return float(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found
