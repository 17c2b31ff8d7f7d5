"""The group filter: miles' ``check_no_aborted``, and an end to a run in which every group is lost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from termrl.errors import RunError
from termrl.integrations.miles.report import flat
from termrl.integrations.miles.settings import read_settings

REASON = "group_has_aborted"

_lost_in_a_row: Counter[str] = Counter()


def keep_group(args: Any, samples: Sequence[Any], **kwargs: Any) -> Any:
    """Keep a group unless one of its samples was aborted; for ``--dynamic-sampling-filter-path``.

    Raises:
        RunError: as many groups were lost in a row as ``stop_after_lost_groups`` says. miles itself would go on for
            ever, since it takes another group in place of each that is dropped.
    """
    causes = Counter(_cause(sample) for sample in flat(samples) if sample.status == type(sample).Status.ABORTED)
    if not causes:
        _lost_in_a_row.clear()
        return _verdict(True, None)
    _lost_in_a_row["groups"] += 1
    limit = read_settings(os.environ).stop_after_lost_groups
    if limit and _lost_in_a_row["groups"] >= limit:
        _lost_in_a_row.clear()
        why = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
        raise RunError(
            f"{limit} groups in a row were lost to aborted samples; the causes in the last one: {why}",
            hint="the log names each; stop_after_lost_groups = 0 goes on regardless",
        )
    return _verdict(False, REASON)


def _cause(sample: Any) -> str:
    metrics = sample.metadata.get("agent_metrics") if isinstance(sample.metadata, dict) else None
    return str((metrics or {}).get("cause") or "unknown")


def _verdict(keep: bool, reason: str | None) -> Any:
    try:
        from miles.rollout.filter_hub.base_types import DynamicFilterOutput  # pyright: ignore[reportMissingImports]
    except ImportError:
        return keep
    return DynamicFilterOutput(keep=keep, reason=reason)
