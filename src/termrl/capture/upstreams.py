"""What the session server asks of an engine: token ids in, token ids and logprobs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "fence", "abort", "context"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one turn.

    Attributes:
        temperature: > 0 samples from softmax(logits / temperature); 0 is greedy (not trainable).
        top_p, top_k: 1.0 and 0 are off; training refuses anything else.
        max_tokens: at most this many new tokens, the stop token included.
        seed: seeds this turn alone; the same seed, prompt and weights give the same tokens.
        stop_token_ids: sampling one of these ends the turn (it is kept in the output).
        stop_at_fence: also end once the reply holds one closed ```bash block (finish reason ``fence``).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_at_fence: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """One turn to generate for a session. ``order`` fixes the row order of a lock-step batch."""

    session_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    order: int = 0


@dataclass(frozen=True)
class GenerateResult:
    """What the engine sampled. ``logprobs[i]`` is that of ``token_ids[i]`` under the sampling distribution."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int


class Upstream(Protocol):
    """An engine behind the session server."""

    model_name: str
    context_window: int

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn. Cancelling the call cancels the generation.

        Raises:
            CaptureError: ids or logprobs are missing or malformed.
            PolicyError: the engine failed.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Forget what is cached for a session. Idempotent."""
        ...
