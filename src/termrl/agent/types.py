"""The agent's nouns: :class:`Opening`, :class:`Limits`, :class:`Reply`, :class:`Turn`, :class:`Episode`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from termrl.capture.segments import Segment
from termrl.verifier.verdict import EndReason, Verdict

Message = dict[str, Any]


@dataclass(frozen=True)
class Opening:
    """How an episode's conversation begins, before the task's instruction.

    Attributes:
        messages: system prompt and demonstrations, as chat messages (never trained on).
        instruction_template: the first user turn; ``{instruction}`` is replaced by the task's own text.
    """

    messages: tuple[Message, ...]
    instruction_template: str = "{instruction}"


@dataclass(frozen=True)
class Limits:
    """What bounds one episode. Times are seconds, sizes tokens or characters.

    Attributes:
        max_turns: generated turns.
        max_tokens: new tokens in one turn.
        context_window: tokens of the whole conversation; ``None`` leaves it to the endpoint.
        wall_s: engine service + exec time (not queues, slots, reset or verify); min with the task's own timeout.
        command_timeout_s: one command; ``None`` takes the environment's.
        output_chars: characters of one observation that go back to the policy.
        max_format_errors: format errors fed back before the episode ends with ``no_command``.
        verify_timeout_s: the tests; ``None`` takes the task's.
        grade_cut: run the tests also after a wall cap (evaluation), rather than score 0 (training).
        lenient: the reply parser's lenient mode.
    """

    max_turns: int = 30
    max_tokens: int = 1024
    context_window: int | None = None
    wall_s: float | None = None
    command_timeout_s: float | None = None
    output_chars: int = 4000
    max_format_errors: int = 3
    verify_timeout_s: float | None = None
    grade_cut: bool = False
    lenient: bool = False


@dataclass(frozen=True)
class Reply:
    """One assistant turn as the endpoint gave it. ``message`` is echoed back verbatim on the next call."""

    message: Message
    content: str
    finish_reason: str
    reasoning: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    service_s: float = 0.0
    queue_s: float = 0.0


class Policy(Protocol):
    """Something that answers a conversation; one object per episode (it may hold a policy session)."""

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        """Answer.

        Raises:
            PolicyError: the endpoint failed; the episode has no verdict.
        """
        ...


@dataclass
class Turn:
    """One turn of the record. ``kind`` says what the reply was."""

    index: int
    reply: str
    finish_reason: str
    kind: Literal["command", "complete", "command_complete", "format_error", "cut"]
    command: str | None = None
    observation: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    truncated_bytes: int = 0
    background: int = 0
    error: str = ""
    generation_s: float = 0.0
    queue_s: float = 0.0
    exec_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seed: int | None = None


@dataclass
class Episode:
    """One attempt at one task. ``reward`` is 1.0, 0.0 (or raw), or ``None`` when there is no verdict."""

    task_id: str
    seed: int
    turns: list[Turn] = field(default_factory=list)
    end_reason: EndReason = EndReason.ABORTED
    verdict: Verdict | None = None
    reward: float | None = None
    error: str = ""
    instruction: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
