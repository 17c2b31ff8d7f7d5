"""One policy update over a prefix tree: :class:`Trainer`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from termrl.errors import ModelError
from termrl.training.adapter import AdapterInfo, base_sha256, write_adapter, write_model
from termrl.training.advantages import Sample
from termrl.training.batch import Batch, SkipReason, make_batch
from termrl.training.config import TrainingConfig
from termrl.training.decoder import PackedDecoder
from termrl.training.losses import k3
from termrl.training.memory import trim
from termrl.training.objective import Objective
from termrl.training.passes import PassSums, evaluate, forward_backward


@dataclass(frozen=True)
class UpdateMetrics:
    """What one :meth:`Trainer.update` did. Means are over trained tokens and the batch's optimiser steps.

    Attributes:
        skipped: why nothing was trained, or ``None``; the figures are then 0.
        loss: the batch's loss.
        grad_norm: global norm of the gradient before clipping.
        clip_fraction: share of tokens whose gradient a bound of the ratio removed (``cispo``: scaled).
        sequence_masked: share of tokens whose episode ``sequence_mask`` left out.
        kl: k3 estimate of KL(old ‖ new), nats; 0 at the first of the batch's steps when nothing is stale.
        kl_reference: k3 estimate of KL(new ‖ base model), nats; 0 unless ``kl_coef`` > 0.
        entropy: of the sampling distribution at the trained positions (each distinct one once), nats.
        tokens_trained: tokens in the loss.
        tokens_computed: distinct tokens that went through the model in one pass.
        logprob_diff: mean |trainer's logprob - captured logprob| before the first step.
        logprob_k3: k3 estimate of KL(engine ‖ trainer) before the first step, nats.
        optimiser_steps: steps taken.
        lr: learning rate of the last step.
        seconds: wall time.
    """

    skipped: SkipReason | None = None
    loss: float = 0.0
    grad_norm: float = 0.0
    clip_fraction: float = 0.0
    sequence_masked: float = 0.0
    kl: float = 0.0
    kl_reference: float = 0.0
    entropy: float = 0.0
    tokens_trained: int = 0
    tokens_computed: int = 0
    logprob_diff: float = 0.0
    logprob_k3: float = 0.0
    optimiser_steps: int = 0
    lr: float = 0.0
    seconds: float = 0.0


class Trainer:
    """Holds the weights, what of them is trained, and AdamW; turns scored episodes into new weights.

    Nothing in it is random after the start, and no order of work depends on timing: the same weights, samples and
    threads give the same bits.
    """

    def __init__(
        self,
        model_dir: Path,
        config: TrainingConfig,
        *,
        seed: int,
        threads: int | None = None,
        base_id: str | None = None,
    ) -> None:
        """Load the model.

        Args:
            model_dir: a folder that transformers can load, of the Llama, Qwen2 or Qwen3 kind.
            config: every setting.
            seed: of the low-rank update's start (a full fine-tune starts at the base).
            threads: threads while it works; ``None`` leaves torch's.
            base_id: the base model's public name, for saved adapters; default: the folder's name.

        Raises:
            ModelError: the folder cannot be loaded, or the model is of another kind.
        """
        self.model_dir = model_dir
        self.config = config
        self.base_id = base_id or model_dir.name
        self.step = 0
        self._threads = threads
        self._base_sha256: str | None = None
        self._dtype = torch.float64 if config.dtype == "float64" else torch.float32
        self._seed = seed
        self._base: PackedDecoder | None = None
        lora = None if config.full else config.lora
        self._decoder = PackedDecoder(model_dir, lora, full=config.full, seed=seed, dtype=self._dtype)
        self.vocabulary = self._decoder.vocabulary
        self._parameters = self._decoder.parameters()
        self._optimiser = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._decoder.refresh()

    def update(self, samples: Sequence[Sample]) -> UpdateMetrics:
        """Train on one batch of episodes (dead groups and episodes without a verdict left out by the caller).

        A batch without anything to train on changes nothing and says why; a gradient that is not finite is not applied.

        Raises:
            CaptureError: a segment that cannot be trained on.
        """
        started = time.perf_counter()
        with _intra_op_threads(self._threads):
            batch = self._make_batch(samples)
            trim()  # what sampling the batch has left behind
            metrics = UpdateMetrics(skipped=batch) if isinstance(batch, str) else self._train(batch)
            self._optimiser.zero_grad(set_to_none=True)
            trim()
        return replace(metrics, seconds=time.perf_counter() - started)

    def logprobs(self, samples: Sequence[Sample], *, pristine: bool = False) -> list[list[Tensor]]:
        """Natural-log probability of each trained token under the current weights, by sample and segment.

        Args:
            samples: as for :meth:`update`; advantages and truncation are ignored.
            pristine: under the base model instead.
        """
        with _intra_op_threads(self._threads):
            return self._logprobs(samples, pristine)

    def _logprobs(self, samples: Sequence[Sample], pristine: bool) -> list[list[Tensor]]:
        result: list[list[Tensor]] = []
        for sample in samples:
            result.append([])
            for segment in sample.segments:
                alone = Sample((segment,), 1.0, 0, 0)
                batch = self._make_batch([alone])
                empty = torch.zeros(0, dtype=self._dtype)
                result[-1].append(empty if isinstance(batch, str) else self._evaluate(batch, pristine=pristine))
        return result

    def _train(self, batch: Batch) -> UpdateMetrics:
        config = self.config
        objective = self._objective(batch)
        totals = PassSums()
        grad_norms = 0.0
        lr = 0.0
        for round_ in range(config.updates_per_batch):
            sums = self._backward(batch, objective, round_)
            if sums.rejected == batch.tokens:
                return UpdateMetrics(skipped="sequence_mask", sequence_masked=1.0)
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, config.grad_clip))
            if not torch.isfinite(torch.tensor(grad_norm)):
                return UpdateMetrics(skipped="non_finite_gradient", optimiser_steps=round_)
            lr = self._optimise()
            grad_norms += grad_norm
            totals += sums
        rounds = config.updates_per_batch
        difference = objective.first - batch.captured
        return UpdateMetrics(
            loss=totals.loss / rounds,
            grad_norm=grad_norms / rounds,
            clip_fraction=totals.clipped / (rounds * batch.tokens),
            sequence_masked=totals.rejected / (rounds * batch.tokens),
            kl=totals.kl_old / (rounds * batch.tokens),
            kl_reference=totals.kl_reference / (rounds * batch.tokens),
            entropy=totals.entropy / totals.rows,
            tokens_trained=batch.tokens,
            tokens_computed=batch.plan.computed_tokens,
            logprob_diff=float(difference.abs().mean()),
            logprob_k3=float(k3(difference).mean()),
            optimiser_steps=rounds,
            lr=lr,
        )

    def _objective(self, batch: Batch) -> Objective:
        reference = self._evaluate(batch, pristine=True) if self.config.kl_coef > 0 else None
        return Objective(batch, self.config, reference=reference)

    def _backward(self, batch: Batch, objective: Objective, round_: int) -> PassSums:
        """Make the gradient of the batch's optimiser step ``round_``."""
        now = self._evaluate(batch, pristine=False) if objective.wants_logprobs(round_) else None
        objective.begin(round_, now)
        self._optimiser.zero_grad(set_to_none=True)
        return forward_backward(self._decoder, batch, objective, threads=torch.get_num_threads())

    def _evaluate(self, batch: Batch, *, pristine: bool) -> Tensor:
        decoder = self._base_decoder() if pristine else self._decoder
        return evaluate(decoder, batch, pristine=pristine, threads=torch.get_num_threads())

    def _base_decoder(self) -> PackedDecoder:
        """What computes the base model: in a full fine-tune a second copy of the weights, loaded when first needed."""
        if not self.config.full:
            return self._decoder
        if self._base is None:
            self._base = PackedDecoder(self.model_dir, None, full=False, seed=self._seed, dtype=self._dtype)
        return self._base

    def _make_batch(self, samples: Sequence[Sample]) -> Batch | SkipReason:
        return make_batch(
            samples, self.config, vocabulary=self.vocabulary, dtype=self._dtype, parts=torch.get_num_threads()
        )

    def _optimise(self) -> float:
        """One AdamW step at the warm-up's learning rate; returns that rate."""
        lr = self.config.lr * min(1.0, (self.step + 1) / max(1, self.config.warmup_steps))
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        self._optimiser.step()
        self.step += 1
        self._decoder.refresh()
        return lr

    def gradients(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The loss's gradient at the current weights, before clipping. Changes nothing.

        Under peft's names; in a full fine-tune, under transformers'.

        Empty for a batch without anything to train on.
        """
        with _intra_op_threads(self._threads):
            batch = self._make_batch(samples)
            if isinstance(batch, str):
                return {}
            self._backward(batch, self._objective(batch), 0)
        gradients = {name: gradient.clone() for name, gradient in self._decoder.full_gradients().items()}
        for stack in self._decoder.lora_stacks:
            for site, a, b in stack.gradients():
                gradients.update(_peft_names(site.name, a, b))
        self._optimiser.zero_grad(set_to_none=True)
        return gradients

    def merged_weights(self) -> dict[str, Tensor]:
        """The weights that training changes, by transformers name; those that are not trained are left out.

        With a low-rank update, pristine base + scaling · B·A, as read-only views that keep their values when training
        goes on. In a full fine-tune all weights, copied.
        """
        weights = self._decoder.trained_weights()
        return {name: weight.clone() for name, weight in weights.items()} if self.config.full else weights

    def adapter_weights(self) -> dict[str, Tensor]:
        """A and B of each trained layer, copied, under peft's names; empty in a full fine-tune."""
        weights: dict[str, Tensor] = {}
        for stack in self._decoder.lora_stacks:
            for site, a, b in stack.updates():
                weights.update(_peft_names(site.name, a.clone(), b.clone()))
        return weights

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed trainer needs for the same bits, copied: what is trained, AdamW's moments, the step."""
        tensors: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            tensors[f"parameter.{index}"] = parameter.detach().clone()
            for name, value in self._optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{index}.{name}"] = torch.as_tensor(value).detach().clone()
        return {"step": self.step, "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            ModelError: the state is of another model or another low-rank update.
        """
        tensors: Mapping[str, Tensor] = state["tensors"]
        for index, parameter in enumerate(self._parameters):
            saved = tensors.get(f"parameter.{index}")
            if saved is None or saved.shape != parameter.shape:
                raise ModelError(
                    "the saved trainer state does not fit this model and [lora] settings",
                    hint="resume with the settings that the run began with",
                )
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                parameter.copy_(tensors[f"parameter.{index}"])
                start = f"optimiser.{index}."
                moments = {name[len(start) :]: t.clone() for name, t in tensors.items() if name.startswith(start)}
                self._optimiser.state.pop(parameter, None)
                if moments:
                    self._optimiser.state[parameter] = moments
        self.step = int(state["step"])
        self._decoder.refresh()

    def save_adapter(self, path: Path) -> None:
        """Write the low-rank update as a folder in peft's format, with the base's id and sha256.

        Raises:
            ModelError: there is none, as all weights are trained.
        """
        if self.config.full:
            raise ModelError("a full fine-tune has no adapter", hint="save_model writes the whole model")
        if self._base_sha256 is None:
            self._base_sha256 = base_sha256(self.model_dir)
        lora = self.config.lora
        info = AdapterInfo(self.base_id, self._base_sha256, lora.rank, lora.alpha, tuple(lora.targets))
        write_adapter(path, info, self.adapter_weights())

    def save_model(self, path: Path) -> None:
        """Write the whole model with its tokenizer as a folder that transformers loads, in float32."""
        write_model(path, self.model_dir, self._decoder.trained_weights())


def _peft_names(layer: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}


@contextmanager
def _intra_op_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)
