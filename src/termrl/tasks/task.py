"""One task: a Harbor folder, validated and frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from termrl.sandboxes.base import SandboxSpec


@dataclass(frozen=True)
class Task:
    """A Harbor task folder as the rest of the program sees it. Paths are absolute; times are seconds.

    Attributes:
        id: the task's name within its set (``[task] name`` without its org, else the folder's name).
        path: the folder.
        instruction: what the policy is told (canary comment lines stripped).
        tests: ``tests/``; ``solution``: ``solution/`` or ``None``.
        sandbox: what its sandbox is made from.
        verifier_timeout_s: budget of upload, tests and download.
        agent_timeout_s: the task's own wall cap, ``None`` for no limit.
        verifier_env, solution_env: with ``${VAR}`` still unresolved (filled from the host when used).
        tests_use_network: the tests cannot be trusted to say anything without a network.
        metadata: ``[metadata]`` as it stands; ``family`` and ``level`` are read from here.
    """

    id: str
    path: Path
    instruction: str
    tests: Path
    solution: Path | None
    sandbox: SandboxSpec
    verifier_timeout_s: float = 600.0
    agent_timeout_s: float | None = None
    verifier_env: dict[str, str] = field(default_factory=dict)
    solution_env: dict[str, str] = field(default_factory=dict)
    tests_use_network: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The task family for reports (``[metadata] family``), else the task's id."""
        return str(self.metadata.get("family", self.id))
