"""What a training run tells whoever watches it. The command line draws it; tests and notebooks may ignore it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from termrl.agent.types import Episode
from termrl.runs.metrics import EvalScores


class Watcher(Protocol):
    """Called from the run's own thread, in order. Must return quickly and not raise."""

    def started(self, run: Path, *, steps: int, first_step: int) -> None:
        """The run folder stands; training steps ``first_step`` … ``steps`` follow."""

    def sandboxes(self, live: Callable[[], int]) -> None:
        """Sandboxes can be made from now on; ``live`` counts those that are up, at any time, from any thread."""

    def phase(self, name: str, *, step: int, total: int) -> None:
        """A phase begins (``evaluate``, ``rollout``, ``update``) that has ``total`` episodes (0: not counted)."""

    def episode(self, episode: Episode) -> None:
        """One episode of the current phase ended."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step is recorded."""

    def evaluated(self, name: str, scores: EvalScores) -> None:
        """An evaluation (``before``, ``after``, ``step N``) is recorded."""

    def finished(self, summary: Mapping[str, Any], rewards: Mapping[int, float]) -> None:
        """The summary is written; ``rewards`` are the mean rewards by step."""


class Silent:
    """A watcher that shows nothing."""

    def started(self, run: Path, *, steps: int, first_step: int) -> None: ...
    def sandboxes(self, live: Callable[[], int]) -> None: ...
    def phase(self, name: str, *, step: int, total: int) -> None: ...
    def episode(self, episode: Episode) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluated(self, name: str, scores: EvalScores) -> None: ...
    def finished(self, summary: Mapping[str, Any], rewards: Mapping[int, float]) -> None: ...


class Together:
    """Several watchers, each told everything, in order."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)

    def started(self, run: Path, *, steps: int, first_step: int) -> None:
        """The run folder stands."""
        for watcher in self._watchers:
            watcher.started(run, steps=steps, first_step=first_step)

    def sandboxes(self, live: Callable[[], int]) -> None:
        """Sandboxes can be made."""
        for watcher in self._watchers:
            watcher.sandboxes(live)

    def phase(self, name: str, *, step: int, total: int) -> None:
        """A phase begins."""
        for watcher in self._watchers:
            watcher.phase(name, step=step, total=total)

    def episode(self, episode: Episode) -> None:
        """An episode ended."""
        for watcher in self._watchers:
            watcher.episode(episode)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is recorded."""
        for watcher in self._watchers:
            watcher.step(step, metrics)

    def evaluated(self, name: str, scores: EvalScores) -> None:
        """An evaluation is recorded."""
        for watcher in self._watchers:
            watcher.evaluated(name, scores)

    def finished(self, summary: Mapping[str, Any], rewards: Mapping[int, float]) -> None:
        """The summary is written."""
        for watcher in self._watchers:
            watcher.finished(summary, rewards)
