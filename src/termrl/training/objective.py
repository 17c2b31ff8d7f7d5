"""The loss of one batch as its passes need it: any part of the tokens at a time, episodes seen as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from termrl.training.batch import Batch
from termrl.training.config import TrainingConfig
from termrl.training.losses import LossTerms, geometric_mask, policy_loss, sequence_means, truncated_importance


class Objective:
    """The loss over a batch's optimiser steps. :meth:`begin` each step, then call it with parts of the batch's tokens.

    Attributes:
        first: [tokens] the trainer's logprobs before the batch's first step, known once that step's pass is over.
    """

    def __init__(self, batch: Batch, config: TrainingConfig, *, reference: Tensor | None = None) -> None:
        """``reference``: [tokens] the base model's logprobs, for the KL."""
        self._batch = batch
        self._config = config
        self._reference = reference
        self._fresh = True
        self._log_ratio: Tensor | None = None
        self._keep = torch.ones(len(batch.captured), dtype=torch.bool)
        self.first = torch.zeros_like(batch.captured)

    def wants_logprobs(self, round_: int) -> bool:
        """Whether the step needs all current logprobs before its backward pass.

        It does where a token's loss depends on its whole episode and an episode is spread over several packs.
        """
        whole_episode = self._config.loss == "gspo" or (self._config.sequence_mask is not None and round_ == 0)
        return whole_episode and self._batch.spread

    def begin(self, round_: int, now: Tensor | None = None) -> None:
        """Start optimiser step ``round_`` (from 0); ``now``: [tokens] current logprobs, if they were wanted."""
        self._fresh = round_ == 0
        self._log_ratio = None
        if now is None:
            return
        everything = torch.arange(len(now))
        if self._fresh:
            self.first.copy_(now)
            self._reject(now, everything)
        if self._config.loss == "gspo":
            self._log_ratio = self._sequence_log_ratio(now, everything)

    def __call__(self, logprob: Tensor, tokens: Tensor) -> LossTerms:
        """The loss of ``tokens`` (indices into the batch), which ``logprob`` belongs to. Safe to call from threads."""
        config, batch = self._config, self._batch
        now = logprob.detach()
        known = self._log_ratio is not None or (self._fresh and self.wants_logprobs(0))
        if self._fresh:
            self.first[tokens] = now
            if not known:
                self._reject(now, tokens)
        sequence_log_ratio = None
        if config.loss == "gspo":
            sequence_log_ratio = (
                self._sequence_log_ratio(now, tokens) if self._log_ratio is None else self._log_ratio[tokens]
            )
        importance = None
        if config.tis_cap is not None:
            importance = truncated_importance(self.first[tokens], batch.captured[tokens], config.tis_cap)
        return policy_loss(
            logprob,
            self._old(tokens),
            batch.advantage[tokens],
            batch.weight[tokens],
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            surrogate=config.loss,
            dual_clip=config.dual_clip,
            sequence_log_ratio=sequence_log_ratio,
            keep=None if config.sequence_mask is None else self._keep[tokens],
            importance=importance,
            reference=None if self._reference is None else self._reference[tokens],
            kl_coef=config.kl_coef,
        )

    def _old(self, tokens: Tensor) -> Tensor:
        """The ratio's denominator."""
        return (self._batch.captured if self._config.old_logprobs == "captured" else self.first)[tokens]

    def _means(self, values: Tensor, tokens: Tensor) -> Tensor:
        """For each of ``tokens``, the mean of ``values`` over its episode, all of whose tokens are among them."""
        episode = self._batch.episode[tokens]
        return sequence_means(values, episode, self._batch.episodes)[episode]

    def _sequence_log_ratio(self, now: Tensor, tokens: Tensor) -> Tensor:
        return self._means(now - self._old(tokens), tokens)

    def _reject(self, now: Tensor, tokens: Tensor) -> None:
        """Decide which episodes are trained on, by the trainer's first logprobs against the engine's."""
        if self._config.sequence_mask is not None:
            means = self._means(now - self._batch.captured[tokens], tokens)
            self._keep[tokens] = geometric_mask(means, *self._config.sequence_mask)
