"""Agent metrics for W&B and Prometheus, through what miles logs itself.

miles calls a log function with its own metrics before it logs them; what is added there goes wherever the others go.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from termrl.verifier.causes import Cause

PREFIX = "agent/"
_LOST_GROUPS = ("rollout/dynamic_filter/drop_group_has_aborted", "rollout/fully_async/aborted_groups_filtered")
_MEANS = {
    "turns": "turns",
    "tool_calls": "tool_calls",
    "format_errors": "format_errors",
    "total_gen_time": "gen_time",
    "total_tool_time": "tool_time",
    "queue_time": "queue_time",
    "reset_time": "reset_time",
    "eval_time": "eval_time",
}


class Tally:
    """What became of this process's episodes since the last report, those of dropped groups included.

    Attributes:
        unscored: samples that were marked as aborted for want of a reward.
        faults: why the latest episodes without a verdict have none (surplus ones apart); not begun anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.unscored = 0
        self.faults: deque[str] = deque(maxlen=32)

    def ended(self, result: Mapping[str, Any]) -> None:
        """An episode came to ``result``."""
        metrics = result["agent_metrics"]
        cause = metrics["cause"]
        names = ["episodes", f"end_reason/{metrics['end_reason']}"]
        if result["reward"] is None:
            names.append(f"dropped/{cause}")
            surplus = cause == Cause.CANCELLED
            names.append("surplus" if surplus else "faults")
            if not surplus:
                self.faults.append(f"{cause}: {result['eval_report'].get('detail') or 'no detail'}")
        elif cause is not None:
            names.append(f"cause/{cause}")
        names += [f"retried/{cause}" for cause in metrics["retried"]]
        names += [f"tamper/{signal}" for signal in metrics["tamper_signals"]]
        with self._lock:
            self._counts.update(names)

    def take(self) -> dict[str, float]:
        """The counts, and what share of the episodes that were not surplus failed; counting begins anew."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            unscored, self.unscored = self.unscored, 0
        wanted = counts["episodes"] - counts.pop("surplus", 0)
        faults = counts.pop("faults", 0)
        if not counts["episodes"]:
            return {}
        found: dict[str, float] = {f"{PREFIX}{name}": count for name, count in sorted(counts.items())}
        found[f"{PREFIX}samples_aborted"] = unscored
        if wanted:
            found[f"{PREFIX}fault_rate"] = faults / wanted
        return found


TALLY = Tally()


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Any,
    rollout_extra_metrics: MutableMapping[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Add ``agent/…`` to what miles logs of a rollout; for ``--custom-rollout-log-function-path``.

    Means are over the samples that are trained on; counts over every episode since the last report.

    Returns:
        False: miles' own logging goes on.
    """
    metrics = {**agent_means(flat(samples)), **TALLY.take()}
    known = rollout_extra_metrics or {}
    metrics[f"{PREFIX}groups_lost"] = sum(known.get(name, 0) for name in _LOST_GROUPS)
    _pass_on(args, rollout_id, metrics, rollout_extra_metrics, "rollout/step")
    return False


def log_eval(rollout_id: int, args: Any, data: Any, extra_metrics: MutableMapping[str, Any] | None) -> bool:
    """Add ``eval/agent/…`` to what miles logs of an evaluation; for ``--custom-eval-rollout-log-function-path``.

    Returns:
        False: miles' own logging goes on.
    """
    samples = [sample for part in data.values() for sample in part.get("samples") or ()]
    metrics = {**agent_means(flat(samples)), **TALLY.take()}
    found = {f"eval/{name}": value for name, value in metrics.items()}
    _pass_on(args, rollout_id, found, extra_metrics, "eval/step")
    return False


def agent_means(samples: Iterable[Any]) -> dict[str, float]:
    """Means of the agent metrics that samples carry."""
    found = [
        metrics
        for sample in samples
        if isinstance(sample.metadata, dict) and isinstance(metrics := sample.metadata.get("agent_metrics"), dict)
    ]
    if not found:
        return {}
    return {
        f"{PREFIX}{name}": sum(float(metrics.get(key) or 0.0) for metrics in found) / len(found)
        for key, name in _MEANS.items()
    }


def flat(samples: Iterable[Any]) -> Iterator[Any]:
    """Samples of groups of samples; one episode may have come to several."""
    for sample in samples:
        if isinstance(sample, list):
            yield from flat(sample)
        else:
            yield sample


def _pass_on(
    args: Any, rollout_id: int, metrics: dict[str, Any], known: MutableMapping[str, Any] | None, step_key: str
) -> None:
    """Put metrics among those that miles is about to log, or log them by themselves where there are none."""
    if known is not None:
        known.update(metrics)
        return
    try:
        from miles.utils.metric_utils import compute_rollout_step  # pyright: ignore[reportMissingImports]
        from miles.utils.tracking_utils import tracking  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    tracking.log(args, {**metrics, step_key: compute_rollout_step(args, rollout_id)}, step_key=step_key)
