"""One task: a Harbor folder, validated and frozen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from termrl.sandboxes.base import SandboxSpec
from termrl.tasks.env import resolve_env
from termrl.tasks.seal import Seal, digest


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
        sandbox.env, verifier_env, solution_env: with ``${VAR}`` still unresolved (filled from the host when used,
            see :func:`~termrl.tasks.env.resolve_env` and :meth:`resolved_sandbox`).
        tests_use_network: the tests cannot be trusted to say anything without a network.
        metadata: ``[metadata]`` as it stands; ``family`` and ``level`` are read from here.
        warnings: what is odd about the folder but no reason to refuse it, such as unknown keys; one a line.
        seal: what the folder held when it was loaded; ``None`` for a task that was put together by hand.
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
    warnings: tuple[str, ...] = ()
    seal: Seal | None = field(default=None, compare=False, repr=False)

    @property
    def digest(self) -> str:
        """Digest of the folder as it was loaded (:func:`termrl.tasks.seal.digest`)."""
        return digest(self.path) if self.seal is None else self.seal.digest

    def check_unchanged(self) -> None:
        """Return if the folder still holds what was loaded; at most a millisecond where no file was touched.

        Raises:
            TaskError: it does not; names the files.
        """
        if self.seal is not None:
            self.seal.check()

    @property
    def family(self) -> str:
        """The task family for reports (``[metadata] family``), else the task's id."""
        return str(self.metadata.get("family", self.id))

    @property
    def level(self) -> int | None:
        """The task's level (``[metadata] level``), ``None`` if it has none."""
        level = self.metadata.get("level")
        return level if isinstance(level, int) else None

    def resolved_sandbox(self) -> SandboxSpec:
        """What to make the sandbox from, with ``[environment] env`` filled from the host.

        Raises:
            TaskError: a variable that has no default is not set on the host.
        """
        return replace(self.sandbox, env=resolve_env(self.sandbox.env, f"{self.path}/task.toml: environment.env"))
