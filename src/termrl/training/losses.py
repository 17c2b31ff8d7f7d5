"""The policy loss as pure functions on flat tensors: one entry a trained token, all of one batch or any part of it.

``weight`` carries the aggregation: it is made once for the whole batch (:func:`token_weights`), so that the sum of the
parts' losses is the batch's loss however the batch is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Surrogate = Literal["clip", "cispo", "gspo"]

# e^20: far outside any clip, and small enough that no product overflows into NaN.
_LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossTerms:
    """A part's loss and the sums that metrics are made of.

    Attributes:
        loss: scalar, differentiable in ``logprob_new``; adds up over parts.
        clipped: number of tokens whose gradient a bound of the ratio removed (``cispo``: scaled).
        rejected: number of tokens that ``keep`` left out.
        kl_old: sum of the k3 estimates of KL(old ‖ new), nats.
        kl_reference: sum of the k3 estimates of KL(new ‖ reference), nats; 0 without a reference.
    """

    loss: Tensor
    clipped: int
    kl_old: float
    kl_reference: float
    rejected: int = 0


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


def sequence_means(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Mean of ``values`` over each sequence's tokens, in float64; 0 for a sequence without one.

    Args:
        values: [tokens].
        sequence: [tokens] which of the ``count`` sequences each token belongs to.

    Returns:
        [count]. Of log-ratios, this is the logarithm of the geometric mean of the ratios.
    """
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, sequence, values.double())
    lengths = torch.bincount(sequence, minlength=count).clamp(min=1)
    return sums / lengths


def geometric_mask(mean_log_ratio: Tensor, low: float, high: float) -> Tensor:
    """True for the sequences whose geometric-mean ratio exp(``mean_log_ratio``) lies in [low, high].

    Rejects whole sequences that the policy would hardly have sampled as they are; the geometric mean, unlike the
    product, does not condemn long ones. Source: the sequence-level masks of Liu et al., "When speed kills stability:
    demystifying RL collapse from the training-inference mismatch" (2025), and of DeepSeek-V3.2 (arXiv:2512.02556).
    """
    return (mean_log_ratio >= math.log(low)) & (mean_log_ratio <= math.log(high))


def policy_loss(
    logprob_new: Tensor,
    logprob_old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    surrogate: Surrogate = "clip",
    dual_clip: float | None = None,
    sequence_log_ratio: Tensor | None = None,
    keep: Tensor | None = None,
    importance: Tensor | None = None,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossTerms:
    """The surrogate with asymmetric bounds, plus an optional KL to a reference policy.

    Σ weight · keep · (importance · surrogate + kl_coef · k3), with ratio = exp(logprob_new - logprob_old), and with
    low = 1 - ``clip_low``, high = 1 + ``clip_high``:

    - ``clip``: max(-ratio·A, -clip(ratio, low, high)·A). PPO (arXiv:1707.06347), as in GRPO (arXiv:2402.03300), with
      DAPO's two bounds (arXiv:2503.14476).
    - ``cispo``: -sg[clip(ratio, low, high)]·A·logprob_new, sg[·] a constant to the gradient: no token loses its
      gradient, only its weight is bounded. MiniMax-M1 (arXiv:2506.13585, eq. 4 and 5).
    - ``gspo``: as ``clip`` with the sequence's ratio s = (∏ ratio)^(1/length) in place of each token's; written as
      sg[s]·logprob-ratio to the gradient, so each token has the gradient of s at equal advantages (arXiv:2507.18071,
      eq. 5, 7 and 14). With ``sequence_mean`` weights this is GSPO's objective.

    Dual clip: for A < 0 the loss is at most -c·A, so a token that the policy has come to like much more than the
    sampler did cannot dominate the batch (Ye et al., arXiv:1912.09729, eq. 5).

    Args:
        logprob_new: natural-log probabilities under the policy that is trained, at the sampling temperature.
        logprob_old: the same under the policy that the ratio is taken against; constants.
        advantage: of the token's episode.
        weight: from :func:`token_weights`.
        clip_low, clip_high: bounds of the ratio.
        surrogate: see above.
        dual_clip: c > 1, or ``None``; not with ``cispo``.
        sequence_log_ratio: for ``gspo``: log s of each token's sequence, detached; see :func:`sequence_means`.
        keep: [tokens] False where the token's sequence is rejected; it then brings nothing, and stays in the weights'
            denominators. See :func:`geometric_mask`.
        importance: from :func:`truncated_importance`.
        reference: logprobs under the reference policy; with ``kl_coef`` > 0.
        kl_coef: weight of the KL.
    """
    log_ratio = (logprob_new - logprob_old).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    if surrogate == "gspo":
        if sequence_log_ratio is None:
            raise ValueError("surrogate 'gspo' needs sequence_log_ratio")
        own = sequence_log_ratio.to(log_ratio.dtype).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
        ratio = torch.exp(own + logprob_new - logprob_new.detach())
    else:
        ratio = torch.exp(log_ratio)
    bounded_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    if surrogate == "cispo":
        per_token = -bounded_ratio.detach() * advantage * logprob_new
        acted = bounded_ratio != ratio
    else:
        plain = -ratio * advantage
        bounded = -bounded_ratio * advantage
        per_token = torch.maximum(plain, bounded)
        acted = bounded > plain
        if dual_clip is not None:
            ceiling = torch.where(advantage < 0, -dual_clip * advantage, torch.inf)
            acted = acted | (per_token > ceiling)
            per_token = torch.minimum(per_token, ceiling)
    if importance is not None:
        per_token = per_token * importance
    kl_reference = 0.0
    if reference is not None:
        divergence = k3(reference - logprob_new)
        kl_reference = float(divergence.detach().sum())
        per_token = per_token + kl_coef * divergence
    rejected = 0
    if keep is not None:
        per_token = torch.where(keep, per_token, 0.0)
        rejected = int((~keep).sum())
        acted = acted & keep
    return LossTerms(
        loss=(per_token * weight).sum(),
        clipped=int(acted.sum()),
        kl_old=float(k3(log_ratio.detach()).sum()),
        kl_reference=kl_reference,
        rejected=rejected,
    )
