"""The one error vocabulary: every error a user can meet is a :class:`TermrlError` with a hint.

The command line prints ``message`` and ``hint`` and never a traceback (unless ``--debug``). An error that
belongs to the infrastructure of one episode carries the :class:`~termrl.verifier.verdict.Cause` that the
episode's missing verdict is recorded under.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TermrlError(Exception):
    """An error with one clear line for the user and, where there is one, what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(TermrlError):
    """Bad settings. ``problems`` lists every bad field at once, each as ``file: key: message``."""

    exit_code = 2

    def __init__(self, problems: Sequence[str] | str, *, hint: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems), hint=hint)


class TaskError(TermrlError):
    """A task folder that cannot be loaded or run; the message names the folder and the key."""

    exit_code = 2


class ModelError(TermrlError):
    """A model that cannot be loaded, converted or trained; the message names the folder or file."""

    exit_code = 2


class RunError(TermrlError):
    """A run folder that cannot be used, or a run that cannot go on; says why."""


class HungError(RunError):
    """A thread of this process waits for what never comes: nothing but the end of the process frees it."""


class SandboxError(TermrlError):
    """The sandbox, not the policy, failed. ``cause`` is a name of :class:`termrl.verifier.verdict.Cause`."""

    cause = "sandbox_lost"


class SandboxStartError(SandboxError):
    """A sandbox could not be created."""

    cause = "sandbox_start"


class ImageError(SandboxStartError):
    """A sandbox's image could not be had: not pulled, not built, of another architecture."""

    cause = "image_unavailable"


class RateLimitError(ImageError):
    """The registry that holds an image answered that it gets too many requests."""


class SandboxLostError(SandboxError):
    """A running sandbox died or stopped answering."""


class EnvironmentLostError(SandboxError):
    """An environment server went away, broke the protocol or did not answer in time; its episode is lost."""

    cause = "environment_lost"


class ProtocolError(EnvironmentLostError):
    """An environment server said what OpenEnv's protocol does not allow; the connection is closed."""


class DeadlineError(EnvironmentLostError):
    """An environment server did not answer in time; the connection is closed, so no later answer is mistaken."""


class ServerError(EnvironmentLostError):
    """An environment server answered with a coded error; the connection stays open.

    ``code`` is OpenEnv's (``VALIDATION_ERROR``, ``EXECUTION_ERROR``, …), ``details`` the rest of what it sent.
    """

    def __init__(self, code: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"the environment server answered {code}: {message}")
        self.code = code
        self.reason = message
        self.details = dict(details or {})


class CapacityError(SandboxStartError):
    """An environment server has no free slot. ``waited_s`` is how long one was waited for."""

    waited_s = 0.0

    cause = "capacity"


class CommandError(TermrlError):
    """A command that can never run as given (NUL byte, missing working directory, missing shell).

    This is an answer to the policy, not an infrastructure failure: it is fed back as an observation.
    """


class PolicyError(TermrlError):
    """The policy's endpoint failed (connection, protocol, error reply). Infrastructure, never a zero.

    Attributes:
        status: the HTTP status, where there was one.
        unsampled: the endpoint refused the call before it sampled anything (never connected, 429, 503), so that
            asking again cannot sample twice.
        retry_after_s: how long it asked to be left alone.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        status: int | None = None,
        unsampled: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.unsampled = unsampled
        self.retry_after_s = retry_after_s


class CaptureError(TermrlError):
    """The engine behind the session server gave something that cannot be trained on; says what is missing."""
