"""The policy loss as pure functions on flat tensors: one entry a trained token, all of one batch or any part of it.

``weight`` carries the aggregation: it is made once for the whole batch (:func:`token_weights`), so that the sum of the
parts' losses is the batch's loss however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# e^20: far outside any clip, and small enough that no product overflows into NaN.
_LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossTerms:
    """A part's loss and the sums that metrics are made of.

    Attributes:
        loss: scalar, differentiable in ``logprob_new``; adds up over parts.
        clipped: number of tokens whose gradient the clip removed.
        kl_old: sum of the k3 estimates of KL(old ‖ new), nats.
        kl_reference: sum of the k3 estimates of KL(new ‖ reference), nats; 0 without a reference.
    """

    loss: Tensor
    clipped: int
    kl_old: float
    kl_reference: float


def token_weights(
    tokens_per_episode: Sequence[int],
    *,
    aggregation: Literal["token_mean", "sequence_mean", "constant"],
    max_new_tokens: int | None = None,
) -> list[float]:
    """What each trained token of an episode weighs in the batch's loss.

    Args:
        tokens_per_episode: trained tokens (after masking) of each episode with a verdict, over all its segments.
        aggregation: ``token_mean`` (DAPO, arXiv:2503.14476): 1 / all tokens. ``sequence_mean`` (GRPO): 1 / (episodes
            that have a token · the episode's tokens). ``constant`` (Dr. GRPO): 1 / (episodes · ``max_new_tokens``),
            episodes without a token included.
        max_new_tokens: sampled tokens an episode may have; needed for ``constant``.

    Returns:
        One weight an episode, 0.0 for one without tokens.
    """
    total = sum(tokens_per_episode)
    with_tokens = sum(1 for count in tokens_per_episode if count)
    if aggregation == "constant":
        if max_new_tokens is None:
            raise ValueError("aggregation 'constant' needs max_new_tokens")
        return [1.0 / (len(tokens_per_episode) * max_new_tokens) if count else 0.0 for count in tokens_per_episode]
    if aggregation == "sequence_mean":
        return [1.0 / (with_tokens * count) if count else 0.0 for count in tokens_per_episode]
    return [1.0 / total if count else 0.0 for count in tokens_per_episode]


def k3(log_ratio: Tensor) -> Tensor:
    """k3 estimate of KL(q ‖ p) for tokens sampled from q: exp(r) - 1 - r ≥ 0, with ``log_ratio`` r = log p - log q.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    return torch.expm1(log_ratio) - log_ratio


def truncated_importance(recomputed: Tensor, captured: Tensor, cap: float) -> Tensor:
    """min(exp(recomputed - captured), cap), detached: corrects for an engine that samples from other logprobs."""
    return torch.exp(recomputed - captured).clamp(max=cap).detach()


def policy_loss(
    logprob_new: Tensor,
    logprob_old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance: Tensor | None = None,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossTerms:
    """Clipped surrogate with asymmetric bounds, plus an optional KL to a reference policy.

    Σ weight · (importance · max(-ratio·A, -clip(ratio, 1 - clip_low, 1 + clip_high)·A) + kl_coef · k3), with
    ratio = exp(logprob_new - logprob_old). PPO (arXiv:1707.06347) with DAPO's bounds (arXiv:2503.14476).

    Args:
        logprob_new: natural-log probabilities under the policy that is trained, at the sampling temperature.
        logprob_old: the same under the policy that the ratio is taken against; constants.
        advantage: of the token's episode.
        weight: from :func:`token_weights`.
        clip_low, clip_high: bounds of the ratio.
        importance: from :func:`truncated_importance`.
        reference: logprobs under the reference policy; with ``kl_coef`` > 0.
        kl_coef: weight of the KL.
    """
    log_ratio = (logprob_new - logprob_old).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    ratio = torch.exp(log_ratio)
    plain = -ratio * advantage
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    per_token = torch.maximum(plain, bounded)
    if importance is not None:
        per_token = per_token * importance
    kl_reference = 0.0
    if reference is not None:
        divergence = k3(reference - logprob_new)
        kl_reference = float(divergence.detach().sum())
        per_token = per_token + kl_coef * divergence
    return LossTerms(
        loss=(per_token * weight).sum(),
        clipped=int((bounded > plain).sum()),
        kl_old=float(k3(log_ratio.detach()).sum()),
        kl_reference=kl_reference,
    )
