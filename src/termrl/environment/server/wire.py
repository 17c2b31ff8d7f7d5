"""A session's face towards openenv: tbench2's models, and openenv's environment class over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, Field

from termrl import __version__
from termrl.environment import protocol
from termrl.environment.server.openenv import (
    Action,
    Environment,
    EnvironmentMetadata,
    Observation,
    SessionCapacityError,
    State,
)
from termrl.environment.server.session import Session, Sessions
from termrl.errors import CapacityError, TaskError, TermrlError

NAME = "tbench2_env"


class TerminalAction(Action):
    """One step of tbench2. Unknown fields are rejected."""

    action_type: protocol.ActionType = "exec"
    command: str = ""
    session_id: str | None = None
    block: bool = True
    wait_seconds: float | None = Field(default=None, allow_inf_nan=False)
    file_path: str = ""
    content: str = ""


class TerminalObservation(Observation):
    """What came back; see :class:`termrl.environment.protocol.Observation` for ``info``."""

    instruction: str = ""
    output: str = ""
    success: bool = True
    error: str = ""
    task_id: str = ""
    task_path: str = ""
    session_id: str | None = None
    action_type: str = ""
    info: dict[str, Any] = Field(default_factory=dict)


class TerminalState(State):
    """Where a session stands."""

    task_id: str = ""
    task_path: str = ""
    session_id: str = ""
    terminal_ready: bool = False
    last_action_type: str = ""
    last_command: str = ""
    last_output: str = ""


class ResetArguments(BaseModel):
    """What a reset may say. Other keys are left alone: each environment has its own."""

    seed: int | None = None
    episode_id: str | None = Field(default=None, max_length=255)
    task_id: str | None = None
    task_name: str | None = None
    task_path: str | None = None
    path: str | None = None


class TerminalEnvironment(Environment[TerminalAction, TerminalObservation, TerminalState]):
    """What openenv's server drives: one session, opened when it is first needed.

    ``close`` does not wait, as openenv calls it on the event loop; :attr:`session` is there for who can.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, sessions: Sessions) -> None:
        super().__init__()
        self._sessions = sessions
        self._instruction = ""
        self.session: Session | None = None

    async def open(self) -> Session:
        """The session, with a slot.

        Raises:
            SessionCapacityError: there is none.
        """
        if self.session is None:
            try:
                self.session = await self._sessions.open()
            except CapacityError as error:
                admission = self._sessions.admission
                raise SessionCapacityError(admission.active, admission.max_sessions, error.message) from error
        return self.session

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> TerminalObservation:
        """Start the task that ``task_id`` or ``task_name`` names, else the server's default."""
        arguments = ResetArguments.model_validate({"seed": seed, "episode_id": episode_id, **kwargs})
        with _noted(await self.open()) as session:
            if arguments.task_path or arguments.path:
                raise TaskError("task_path: tasks are named by task_id, never by a path", hint="GET /tasks lists them")
            task_id = arguments.task_id or arguments.task_name or self._sessions.default_task_id
            observation = await session.reset(task_id, seed=arguments.seed, episode_id=arguments.episode_id)
        self._instruction = observation.instruction
        return self._observed(observation, {"backend": self._sessions.backend})

    async def step_async(
        self, action: TerminalAction, timeout_s: float | None = None, **kwargs: Any
    ) -> TerminalObservation:
        """Run one action; ``timeout_s`` (of HTTP only) is not tbench2's and not used."""
        fields = action.model_dump(exclude={"metadata"})
        with _noted(await self.open()) as session:
            observation = await session.step(protocol.Action.model_construct(**fields))
        verdict = observation.info.get("verdict")
        if verdict is None:
            return self._observed(observation, {})
        more = {name: verdict[name] for name in ("outcome", "cause", "exit_code", "detail")}
        return self._observed(observation, {**more, "tamper_signals": sorted(verdict["signals"])})

    @property
    def state(self) -> TerminalState:
        if self.session is None:
            return TerminalState()
        state = self.session.state()
        return TerminalState.model_validate({**dict(state), "session_id": state.session_id or ""})

    def close(self) -> None:
        if self.session is not None:
            self.session.end()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name=NAME,
            description="Terminal tasks in sandboxes, scored by their own tests (Terminal-Bench 2's wire).",
            version=__version__,
        )

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TerminalObservation:
        raise NotImplementedError("only reset_async")

    def step(self, action: TerminalAction, timeout_s: float | None = None, **kwargs: Any) -> TerminalObservation:
        raise NotImplementedError("only step_async")

    def _observed(self, observation: protocol.Observation, more: dict[str, Any]) -> TerminalObservation:
        fields = dict(observation)
        # tbench2 repeats it with every observation
        fields["instruction"] = self._instruction
        if more:
            fields["info"] = {**observation.info, **more}
        return TerminalObservation(**fields)


@contextmanager
def _noted(session: Session) -> Iterator[Session]:
    """Keep an operation's error where who tells the client finds it: openenv passes on no more than its text."""
    session.failure = None
    try:
        yield session
    except TermrlError as error:
        session.failure = error
        raise
