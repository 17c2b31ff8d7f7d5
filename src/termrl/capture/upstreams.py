"""What the session server asks of an engine: token ids in, token ids and logprobs out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

from termrl.errors import CaptureError

FinishReason = Literal["stop", "length", "fence", "abort", "context"]
_COLD = 0.01


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
    """What the engine sampled. ``logprobs[i]`` is that of ``token_ids[i]`` under the sampling distribution.

    ``service_s`` and ``queue_s`` are the seconds that the engine worked on the turn and that the turn waited for it;
    ``None`` where the engine cannot tell. Results are compared without them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    service_s: float | None = field(default=None, compare=False)
    queue_s: float | None = field(default=None, compare=False)


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


def check_result(result: GenerateResult) -> None:
    """Refuse what cannot be trained on.

    Raises:
        CaptureError: ids or logprobs are missing, differ in length, are not numbers, or are no logprobs.
    """
    ids, logprobs = result.token_ids, result.logprobs
    if ids is None or logprobs is None:
        raise CaptureError("the engine returned no " + ("token ids" if ids is None else "logprobs"))
    if len(ids) != len(logprobs):
        raise CaptureError(f"the engine returned {len(ids)} token ids but {len(logprobs)} logprobs")
    if not ids and result.finish_reason in ("stop", "length", "fence"):
        raise CaptureError(f"the engine returned no token ids for a turn that finished with {result.finish_reason!r}")
    if any(not isinstance(token, int) or token < 0 for token in ids):
        raise CaptureError("the engine returned something that is no token id")
    if any(not isinstance(value, float) or not math.isfinite(value) or value > 1e-3 for value in logprobs):
        raise CaptureError("the engine returned a logprob that is missing, not finite or positive")


async def preflight(upstream: Upstream, prompt_ids: tuple[int, ...], *, session_id: str = "preflight") -> None:
    """Sample a few tokens before a run starts, so that an engine that cannot be trained on is found at once.

    ``prompt_ids`` is any short valid prompt. At a temperature near 0 the sampling distribution is all but certain of
    what it samples; logprobs that are not near 0 there are those of the raw logits, and useless at temperatures ≠ 1.

    Raises:
        CaptureError: ids or logprobs are missing or malformed, or the logprobs are not those of the sampling.
        PolicyError: the engine failed.
    """
    try:
        for temperature in (1.0, _COLD):
            sampling = SamplingParams(temperature=temperature, max_tokens=8, seed=0)
            result = await upstream.generate(GenerateRequest(session_id, prompt_ids, sampling))
            check_result(result)
            if not 0 < len(result.token_ids) <= 8:
                raise CaptureError(f"the engine sampled {len(result.token_ids)} tokens where up to 8 were asked for")
    finally:
        await upstream.release(session_id)
    if sum(result.logprobs) / len(result.logprobs) < -0.5:
        raise CaptureError(
            "the engine's logprobs do not follow the sampling temperature",
            hint="start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, vLLM with --logprobs-mode processed_logprobs",
        )
