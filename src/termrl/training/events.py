"""What a training run tells whoever watches it. The command line draws it; tests and notebooks may ignore it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from termrl.agent.types import Episode
from termrl.runs.metrics import EvalScores


class Watcher(Protocol):
    """Called from the run's own thread, in order. Must return quickly and not raise."""

    def started(self, run: Path, *, steps: int, first_step: int) -> None:
        """The run folder stands; training steps ``first_step`` … ``steps`` follow."""

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
    def phase(self, name: str, *, step: int, total: int) -> None: ...
    def episode(self, episode: Episode) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluated(self, name: str, scores: EvalScores) -> None: ...
    def finished(self, summary: Mapping[str, Any], rewards: Mapping[int, float]) -> None: ...
