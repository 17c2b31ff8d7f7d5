"""From scored episodes to flat tensors: which tokens are trained, and what each one brings to the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from termrl.capture.segments import Segment
from termrl.errors import CaptureError
from termrl.training.advantages import Sample
from termrl.training.config import TrainingConfig
from termrl.training.losses import token_weights
from termrl.training.packing import Plan, TokenSequence, make_sequence, plan_batch

SkipReason = Literal["no_episode", "no_loss_token", "no_advantage", "sequence_mask", "non_finite_gradient"]


@dataclass(frozen=True)
class Batch:
    """One batch: sequences in an order that depends on their content alone, and a value a trained token.

    Attributes:
        sequences: one for each segment with something to train.
        plan: how they are computed.
        spans: each sequence's range in the flat tensors.
        captured: [tokens] the engine's logprobs.
        advantage: [tokens].
        weight: [tokens] share in the loss; see :func:`termrl.training.losses.token_weights`.
        episode: [tokens] which of the batch's ``episodes`` each token belongs to.
        spread: whether an episode's sequences are in more than one pack.
    """

    sequences: tuple[TokenSequence, ...]
    plan: Plan
    spans: tuple[slice, ...]
    captured: Tensor
    advantage: Tensor
    weight: Tensor
    episode: Tensor
    episodes: int
    spread: bool

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return len(self.captured)


def make_batch(
    samples: Sequence[Sample], config: TrainingConfig, *, vocabulary: int, dtype: torch.dtype, parts: int = 1
) -> Batch | SkipReason:
    """Flatten samples, or say why there is nothing to train on. ``parts``: packs that will be computed at a time.

    Raises:
        CaptureError: a segment that cannot be trained on: greedy, a logprob that is not finite, an unknown token id.
    """
    if not samples:
        return "no_episode"
    kept: list[list[tuple[TokenSequence, list[float]]]] = []
    for sample in samples:
        masked = config.mask_truncated and sample.truncated
        segments = () if masked else sample.segments
        kept.append([made for segment in segments if (made := _read(segment, vocabulary)) is not None])
    counts = [sum(len(sequence.targets) for sequence, _ in made) for made in kept]
    if not sum(counts):
        return "no_loss_token"
    advantages = [sample.advantage for sample, count in zip(samples, counts, strict=True) if count]
    if not all(math.isfinite(advantage) for advantage in advantages):
        raise ValueError("advantages must be finite")
    if not any(advantages) and config.kl_coef == 0:
        return "no_advantage"
    weights = token_weights(counts, aggregation=config.aggregation, max_new_tokens=config.max_new_tokens)
    entries = [
        (sequence, logprobs, sample.advantage, weight, index)
        for index, (sample, made, weight) in enumerate(zip(samples, kept, weights, strict=True))
        for sequence, logprobs in made
    ]
    # Order by content, so that the order of the episodes cannot change a single bit of the result.
    entries.sort(key=lambda e: (e[0].token_ids.tolist(), e[0].targets.tolist(), e[0].temperature, e[1], e[2], e[3]))
    spans: list[slice] = []
    for sequence, *_ in entries:
        start = spans[-1].stop if spans else 0
        spans.append(slice(start, start + len(sequence.targets)))
    sequences = tuple(entry[0] for entry in entries)
    plan = plan_batch(sequences, max_tokens=config.micro_batch_tokens, parts=parts)
    places = [{entries[member][4] for member in pack.members} for pack in plan.packs]
    return Batch(
        sequences=sequences,
        plan=plan,
        spans=tuple(spans),
        captured=torch.tensor([value for entry in entries for value in entry[1]], dtype=dtype),
        advantage=torch.tensor([entry[2] for entry in entries for _ in entry[1]], dtype=dtype),
        weight=torch.tensor([entry[3] for entry in entries for _ in entry[1]], dtype=dtype),
        episode=torch.tensor([entry[4] for entry in entries for _ in entry[1]]),
        episodes=len(samples),
        spread=sum(map(len, places)) > len(set().union(*places)),
    )


def _read(segment: Segment, vocabulary: int) -> tuple[TokenSequence, list[float]] | None:
    """A segment's sequence and captured logprobs; ``None`` if nothing in it is trained."""
    sequence = make_sequence(segment.token_ids, segment.loss_mask, segment.temperature)
    if sequence is None:
        return None
    if not (segment.temperature > 0 and math.isfinite(segment.temperature)):
        raise CaptureError(
            f"session {segment.session_id}: sampled at temperature {segment.temperature}",
            hint="train on episodes that were sampled at a temperature above 0",
        )
    if int(sequence.token_ids.min()) < 0 or int(sequence.token_ids.max()) >= vocabulary:
        raise CaptureError(
            f"session {segment.session_id}: a token id is outside the model's vocabulary of {vocabulary}",
            hint="the engine and the trainer must serve the same model",
        )
    logprobs = [segment.logprobs[position] for position in sequence.targets.tolist()]
    if not all(math.isfinite(value) for value in logprobs):
        raise CaptureError(f"session {segment.session_id}: a captured logprob is not finite")
    return sequence, logprobs
