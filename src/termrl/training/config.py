"""Every setting of one policy update: :class:`TrainingConfig`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_LINEAR: tuple[LinearName, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

FULL_LR = 1e-5
"""Default learning rate where all weights are trained."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSettings(BaseModel):
    """The trained low-rank update: weight = base + (alpha / rank) · B·A."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, ge=1, description="Rank of each low-rank update.")
    alpha: float = Field(
        default=32.0, gt=0, description="Scale of the update; the weight is base + (alpha / rank) · B·A."
    )
    targets: tuple[LinearName, ...] = Field(
        default=ALL_LINEAR,
        min_length=1,
        description="Linear layers that are trained, by their transformers name; default: all.",
    )


class TrainingConfig(BaseModel):
    """How a batch of scored episodes becomes new weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    full: bool = Field(
        default=False, description="Train all weights in place of a low-rank update; [training.lora] is then not used."
    )
    lora: LoraSettings = Field(default_factory=LoraSettings, description="The low-rank update that is trained.")
    lr: float = Field(
        default=4e-4, gt=0, description="AdamW's learning rate after the warm-up. Default with `full`: 1e-5."
    )
    warmup_steps: int = Field(
        default=3, ge=0, description="Optimiser steps over which the learning rate rises linearly."
    )
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the first and second moment."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay (of A and B).")
    grad_clip: float = Field(default=1.0, gt=0, description="The gradient is scaled down to this global norm.")
    loss: Literal["clip", "cispo", "gspo"] = Field(
        default="clip",
        description="What bounds the policy's ratio: `clip` each token's (GRPO, DAPO, Dr. GRPO), `cispo` only each "
        "token's weight, `gspo` the episode's geometric mean. Recipes by name: docs/training.md.",
    )
    clip_low: float = Field(
        default=0.2, ge=0, le=1, description="The ratio is clipped below 1 - clip_low; 1 is no bound."
    )
    clip_high: float = Field(default=0.28, ge=0, description="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Where the advantage is negative the ratio counts as at most this, usually 3.0. Not with `cispo`.",
    )
    sequence_mask: tuple[PositiveFloat, PositiveFloat] | None = Field(
        default=None,
        description="Episodes whose geometric-mean ratio of the trainer's to the engine's probabilities leaves "
        "[low, high] are not trained on, e.g. [0.99, 1.01]; their tokens stay in the denominators.",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the k3 estimate of KL(policy ‖ base model); 0 is off."
    )
    updates_per_batch: int = Field(
        default=1, ge=1, description="Optimiser steps on one batch; the clip acts from the second."
    )
    advantage_scale: Literal["none", "group"] = Field(
        default="none",
        description="`none`: reward - group mean; `group`: also divided by the group's standard deviation.",
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        default="token_mean",
        description="`token_mean`: mean over the batch's tokens; `sequence_mean`: mean over episodes of each one's "
        "token mean; `constant`: sum / (episodes · max_new_tokens). Dr. GRPO is advantage_scale none with constant.",
    )
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Sampled tokens an episode may have; the divisor of aggregation `constant`, needed there.",
    )
    old_logprobs: Literal["captured", "recomputed"] = Field(
        default="captured",
        description="The ratio's denominator: the engine's logprobs, or the trainer's before its first step.",
    )
    tis_cap: float | None = Field(
        default=None,
        gt=0,
        description="Truncated importance sampling: tokens weigh min(exp(recomputed - captured), tis_cap), "
        "usually 2.0. Only with old_logprobs `recomputed`.",
    )
    mask_truncated: bool = Field(default=False, description="Do not train on episodes that were cut by a limit.")
    micro_batch_tokens: int = Field(
        default=512,
        ge=1,
        description="Distinct tokens in one forward/backward, of which each thread runs one; bounds memory.",
    )
    dtype: Literal["float32", "float64"] = Field(
        default="float32",
        description="Precision of weights, activations and gradients; float64 is for numerical checks.",
    )

    @model_validator(mode="before")
    @classmethod
    def _lower_rate_for_all_weights(cls, given: Any) -> Any:
        """The rate that suits a low-rank update would destroy a whole model."""
        if isinstance(given, dict) and given.get("full") in (True, "true", "True", "1", 1) and "lr" not in given:
            return {**given, "lr": FULL_LR}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tis_cap is not None and self.old_logprobs != "recomputed":
            raise ValueError("tis_cap needs old_logprobs = 'recomputed': with 'captured' the ratio corrects already")
        if self.aggregation == "constant" and self.max_new_tokens is None:
            raise ValueError("aggregation = 'constant' needs max_new_tokens")
        if self.dual_clip is not None and self.loss == "cispo":
            raise ValueError("dual_clip has no meaning with loss = 'cispo': clip_high bounds its weights already")
        if self.sequence_mask is not None and not self.sequence_mask[0] <= 1 <= self.sequence_mask[1]:
            raise ValueError("sequence_mask must be [low, high] with low <= 1 <= high")
        if len(set(self.lora.targets)) != len(self.lora.targets):
            raise ValueError("lora.targets names a layer twice")
        return self
