"""The environment's nouns: tbench2's action, observation and state, and the one async interface over them.

Field names, defaults and meanings are those of the Terminal-Bench-2 environment for OpenEnv, so that an
environment in this process and one behind a WebSocket are the same to the agent.
"""

from __future__ import annotations

import abc
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

ActionType = Literal["exec", "write", "view", "wait", "kill", "write_file", "evaluate", "close"]


class Action(BaseModel):
    """One step. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    action_type: ActionType = "exec"
    command: str = ""
    session_id: str | None = None
    block: bool = True
    wait_seconds: float | None = None
    file_path: str = ""
    content: str = ""


class Observation(BaseModel):
    """What came back. ``info`` carries what tbench2 has no field for.

    After ``reset``: ``command_timeout_s``, ``verifier_timeout_sec``, ``agent_timeout_sec`` (``None``: no limit),
    ``docker_image``, ``workdir``. After ``exec``: ``exit_code``, ``timed_out``, ``truncated_bytes``, ``duration_s``,
    ``background``, ``oom``; of a background session ``running``, ``exit_code``. After ``evaluate``: ``verdict`` (a
    :class:`termrl.verifier.Verdict` as a dict), ``tests_passed`` (``None`` without a verdict), ``harness``.
    """

    instruction: str = ""
    output: str = ""
    success: bool = True
    error: str = ""
    task_id: str = ""
    task_path: str = ""
    session_id: str | None = None
    action_type: str = ""
    info: dict[str, Any] = {}
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] = {}


class State(BaseModel):
    """Where a session stands."""

    episode_id: str | None = None
    step_count: int = 0
    task_id: str = ""
    task_path: str = ""
    session_id: str | None = None
    terminal_ready: bool = False
    last_action_type: str = ""
    last_command: str = ""
    last_output: str = ""


class Environment(abc.ABC):
    """One session: reset to a task, step through it, close. Not for concurrent use.

    Attributes:
        admission_s: seconds that a reset may wait for a free slot before it begins. What it did wait is
            ``admission_s`` in its observation's ``info``, and counts against no budget.
    """

    admission_s: float = 0.0

    @abc.abstractmethod
    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        """Start the task in a fresh sandbox (the previous one is gone). Instruction and budgets come from here."""

    @abc.abstractmethod
    async def step(self, action: Action) -> Observation:
        """Run one action.

        Raises:
            SandboxError: the sandbox was lost; the episode has no verdict.
        """

    @abc.abstractmethod
    def state(self) -> State:
        """Where the session stands."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the sandbox. Idempotent."""
