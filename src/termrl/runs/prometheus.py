"""A run's figures for Prometheus: ``GET /metrics`` while the run lasts, on a thread of its own.

Figures of the last step and evaluation are gauges under their own names, ``rollout/pass_rate`` as
``termrl_rollout_pass_rate``; a figure that the last step does not have is not there. What only grows is a counter,
with every series of the closed lists present from the start, so that ``rate()`` sees the first event.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from termrl.agent.types import Episode
from termrl.config import TrackConfig
from termrl.errors import ConfigError
from termrl.rollout.groups import cause_of, lost_attempts
from termrl.runs.metrics import EvalScores, eval_metrics
from termrl.training.events import Silent
from termrl.verifier.causes import INFRASTRUCTURE_CAUSES, REPLAYED_CAUSES, EndReason

if TYPE_CHECKING:
    from prometheus_client import Metric  # pyright: ignore[reportMissingImports]

_FAMILY = "eval/family/"
_COUNTED = ("rollout/end_reason/", "rollout/episodes_dropped/", "rollout/episodes_retried/")
_PHASES = {"rollout": "train", "evaluate": "eval"}


class RunCollector(Silent):
    """Follows a run as its watcher and answers scrapes, from any thread, as a ``prometheus_client`` collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase = "train"
        self._step = self._steps = 0
        self._metrics: dict[str, float] = {}
        self._evaluation: dict[str, float] = {}
        phases = list(_PHASES.values())
        self._ended = Counter({(phase, str(reason)): 0 for phase in phases for reason in EndReason})
        self._missing = Counter({(phase, str(cause)): 0 for phase in phases for cause in INFRASTRUCTURE_CAUSES})
        self._retried = Counter({(phase, str(cause)): 0 for phase in phases for cause in REPLAYED_CAUSES})
        self._live: Callable[[], int] = lambda: 0

    def started(self, run: Path, *, steps: int, first_step: int) -> None:
        """Where the run stands."""
        with self._lock:
            self._steps, self._step = steps, first_step - 1

    def sandboxes(self, live: Callable[[], int]) -> None:
        """What counts the sandboxes."""
        with self._lock:
            self._live = live

    def phase(self, name: str, *, step: int, total: int) -> None:
        """Which phase the next episodes belong to."""
        with self._lock:
            self._phase = _PHASES.get(name, self._phase)

    def episode(self, episode: Episode) -> None:
        """Count an episode, its cause if it has no verdict, and its attempts that lost their environment."""
        with self._lock:
            self._ended[self._phase, str(episode.end_reason)] += 1
            if episode.reward is None:
                self._missing[self._phase, cause_of(episode)] += 1
            for cause, count in lost_attempts([episode]).items():
                self._retried[self._phase, cause] += count

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The gauges are this step's from now on."""
        with self._lock:
            self._step = step
            self._metrics = {name: float(value) for name, value in metrics.items() if not name.startswith(_COUNTED)}

    def evaluated(self, name: str, scores: EvalScores) -> None:
        """The ``eval`` gauges are this evaluation's from now on."""
        with self._lock:
            self._evaluation = eval_metrics(scores)

    def collect(self) -> Iterator[Metric]:
        """Everything, as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # pyright: ignore[reportMissingImports]

        with self._lock:
            step, steps, live = self._step, self._steps, self._live
            metrics, evaluation = self._metrics, self._evaluation
            ended, missing, retried = dict(self._ended), dict(self._missing), dict(self._retried)
        yield GaugeMetricFamily("termrl_step", "Training steps finished.", value=step)
        yield GaugeMetricFamily("termrl_steps", "Training steps that the run is to make.", value=steps)
        yield GaugeMetricFamily("termrl_live_sandboxes", "Sandboxes that are up.", value=live())
        episodes = CounterMetricFamily(
            "termrl_episodes", "Episodes that ended, by reason.", labels=["phase", "end_reason"]
        )
        for labels, count in sorted(ended.items()):
            episodes.add_metric(labels, count)
        yield episodes
        verdicts = CounterMetricFamily(
            "termrl_missing_verdicts", "Episodes without a verdict, by cause.", labels=["phase", "cause"]
        )
        for labels, count in sorted(missing.items()):
            verdicts.add_metric(labels, count)
        yield verdicts
        again = CounterMetricFamily(
            "termrl_retried_episodes", "Episodes that were played again, by cause.", labels=["phase", "cause"]
        )
        for labels, count in sorted(retried.items()):
            again.add_metric(labels, count)
        yield again
        for name, value in metrics.items():
            yield GaugeMetricFamily(gauge_name(name), f"{name} of the last training step.", value=value)
        families = GaugeMetricFamily(
            "termrl_eval_family_pass_rate", "Pass rate of a task family in the last evaluation.", labels=["family"]
        )
        for name, value in evaluation.items():
            if name.startswith(_FAMILY):
                families.add_metric([name.removeprefix(_FAMILY)], value)
            else:
                yield GaugeMetricFamily(gauge_name(name), f"{name} of the last evaluation.", value=value)
        yield families


def gauge_name(metric: str) -> str:
    """The Prometheus name of a metric: ``train/grad_norm`` → ``termrl_train_grad_norm``."""
    return "termrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


@contextmanager
def serving(config: TrackConfig) -> Iterator[list[RunCollector]]:
    """Serve ``/metrics`` as ``config`` says; no watcher where it names no port.

    Beside the run's figures there are those of this process (``termrl_process_…``: memory, CPU, open files).

    Raises:
        ConfigError: ``prometheus_client`` is missing, or the port cannot be had.
    """
    host, port = config.prometheus_host, config.prometheus_port
    if port is None:
        yield []
        return
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"track.prometheus_port: needs the package prometheus-client, which cannot be imported: {error}",
            hint="pip install 'termrl[prometheus]'",
        ) from None
    collector = RunCollector()
    registry = CollectorRegistry()
    ProcessCollector(namespace="termrl", registry=registry)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"track.prometheus_port: cannot listen on {host} port {port}: {error.strerror}",
            hint="give a free one: --prometheus-port N",
        ) from None
    try:
        yield [collector]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
