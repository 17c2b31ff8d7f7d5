"""The group filter: miles' ``check_no_aborted``, and an end to a run in which every group is lost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from termrl.errors import RunError
from termrl.integrations.miles.report import TALLY, flat
from termrl.integrations.miles.settings import read_settings

REASON = "group_has_aborted"

_NAMED = 3

_lost_in_a_row = 0


def keep_group(args: Any, samples: Sequence[Any], **kwargs: Any) -> Any:
    """Keep a group unless one of its samples was aborted; for ``--dynamic-sampling-filter-path``.

    Raises:
        RunError: as many groups were lost in a row as ``stop_after_lost_groups`` says. miles itself would go on for
            ever, since it takes another group in place of each that is dropped.
    """
    global _lost_in_a_row
    if not any(sample.status == type(sample).Status.ABORTED for sample in flat(samples)):
        _lost_in_a_row = 0
        return _verdict(True, None)
    _lost_in_a_row += 1
    limit = read_settings(os.environ).stop_after_lost_groups
    if limit and _lost_in_a_row >= limit:
        _lost_in_a_row = 0
        # a sample without a recorded turn does not carry its cause: miles keeps nothing of what was returned for it
        common = Counter(TALLY.faults).most_common(_NAMED)
        lines = [f"{limit} groups in a row were lost to aborted samples", *(f"{n} × {why}" for why, n in common)]
        raise RunError("\n".join(lines), hint="stop_after_lost_groups = 0 goes on regardless")
    return _verdict(False, REASON)


def _verdict(keep: bool, reason: str | None) -> Any:
    try:
        from miles.rollout.filter_hub.base_types import DynamicFilterOutput  # pyright: ignore[reportMissingImports]
    except ImportError:
        return keep
    return DynamicFilterOutput(keep=keep, reason=reason)
