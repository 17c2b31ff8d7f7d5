"""The server's figures for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from termrl.environment.protocol import ActionType
from termrl.environment.server.admission import Admission
from termrl.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from termrl.verifier.causes import CAUSES, INFRASTRUCTURE_CAUSES
from termrl.verifier.verdict import Outcome

if TYPE_CHECKING:
    from prometheus_client import Metric

OPERATIONS = ("reset", *get_args(ActionType))
ERROR_CODES = (
    *("INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR"),
    *("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"),
)
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


class ServerMetrics:
    """Counts what happens; every series of a closed list is there from the start, so that ``rate()`` sees the first.

    Attributes:
        reaped: sessions that ended for being idle.
    """

    def __init__(self, admission: Admission, provider: CountedProvider, *, swept: int) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(namespace="termrl", registry=registry)
        registry.register(_Now(admission, provider, swept))
        self._operations = Histogram(
            "termrl_server_operation_seconds",
            "Time of an operation, from the request to its answer.",
            ["operation"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._timers = {name: self._operations.labels(name) for name in OPERATIONS}
        self._errors = Counter(
            "termrl_server_errors", "Error frames sent to clients, by code.", ["code"], registry=registry
        )
        for code in ERROR_CODES:
            self._errors.labels(code)
        self._verdicts = Counter(
            "termrl_server_verdicts", "Verdicts given, by outcome and cause.", ["outcome", "cause"], registry=registry
        )
        self._verdicts.labels(str(Outcome.PASSED), "")
        for cause in CAUSES:
            missing = cause in INFRASTRUCTURE_CAUSES
            self._verdicts.labels(str(Outcome.NO_VERDICT if missing else Outcome.FAILED), str(cause))
        self.reaped = Counter("termrl_server_sessions_reaped", "Sessions that ended for being idle.", registry=registry)

    def operation(self, name: str, seconds: float) -> None:
        """An operation came back, or was given up."""
        self._timers[name].observe(seconds)

    def error(self, code: str) -> None:
        """A client was told of an error."""
        self._errors.labels(code).inc()

    def verdict(self, verdict: dict[str, Any] | None) -> None:
        """An ``evaluate`` came back with a verdict (as the dict in its info)."""
        if verdict is not None:
            self._verdicts.labels(verdict["outcome"], verdict["cause"] or "").inc()

    def page(self) -> bytes:
        """Everything, in Prometheus's text format."""
        return generate_latest(self._registry)


class _Now:
    """What is asked for at each scrape."""

    def __init__(self, admission: Admission, provider: CountedProvider, swept: int) -> None:
        self._admission = admission
        self._provider = provider
        self._swept = swept

    def collect(self) -> Iterator[Metric]:
        admission, provider = self._admission, self._provider
        gauges = {
            "termrl_server_sessions": ("Sessions that hold a slot.", admission.active),
            "termrl_server_sessions_max": ("Slots in all.", admission.max_sessions),
            "termrl_server_memory_mb": ("Sum of memory_mb of the tasks in session.", admission.memory_mb),
            "termrl_server_memory_max_mb": ("Bound on that sum.", admission.max_memory_mb),
            "termrl_live_sandboxes": ("Sandboxes that are up.", provider.live),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        counters = {
            "termrl_server_sandboxes_created": ("Sandboxes started.", provider.created),
            "termrl_server_sandboxes_ended": ("Sandboxes gone.", provider.created - provider.live),
            "termrl_server_sandboxes_failed": ("Sandboxes that did not start.", provider.failed),
            "termrl_server_sandboxes_swept": ("Sandboxes of killed processes, removed at the start.", self._swept),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        refused = CounterMetricFamily(
            "termrl_server_sessions_refused",
            "Sessions or resets that were not admitted, by what ran out.",
            labels=["by"],
        )
        for what, count in admission.refused.items():
            refused.add_metric([what], count)
        yield refused


class CountedProvider(SandboxProvider):
    """A provider that counts what it starts.

    Attributes:
        created: sandboxes that were started; ``failed``: those that did not start.
    """

    def __init__(self, inner: SandboxProvider) -> None:
        self._inner = inner
        self.name = inner.name
        self.created = 0
        self.failed = 0

    def refusal(self, spec: SandboxSpec) -> str | None:
        return self._inner.refusal(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        try:
            sandbox = await self._inner.create(spec)
        except Exception:
            self.failed += 1
            raise
        self.created += 1
        return sandbox

    async def close(self) -> None:
        await self._inner.close()

    @property
    def live(self) -> int:
        return self._inner.live
