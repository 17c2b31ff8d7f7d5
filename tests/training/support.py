"""Tiny models, rollouts with the shape of real ones, and the padded reference that the packed trainer must equal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from termrl.capture.segments import Segment
from termrl.training.advantages import Sample
from termrl.training.config import TrainingConfig
from termrl.training.losses import policy_loss, token_weights

VOCABULARY = 97


def save_tiny_model(path: Path, kind: str) -> Path:
    """A random two-layer model of a kind, as a folder that transformers loads."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(11)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, head_dim=8))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False, head_dim=16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return path


def make_segment(ids: Sequence[int], mask: Sequence[int], *, temperature: float = 0.8, seed: int = 0) -> Segment:
    """A segment with made-up captured logprobs near the uniform distribution's."""
    rng = random.Random(seed)
    logprobs = tuple(-4.5 + rng.uniform(-0.4, 0.4) if m else 0.0 for m in mask)
    return Segment("s", tuple(ids), tuple(mask), logprobs, tuple(0 if m else -1 for m in mask), temperature, 1)


def make_samples(seed: int = 0, *, groups: int = 3, size: int = 4, opening: int = 12) -> list[Sample]:
    """Ragged groups with a shared opening: turns of sampled and observed tokens, duplicates, branches, odd segments."""
    rng = random.Random(seed)

    def tokens(n: int, top: int = VOCABULARY) -> list[int]:
        return [rng.randrange(top) for _ in range(n)]

    first = tokens(opening)
    samples: list[Sample] = []
    for group in range(groups):
        prompt = first + tokens(rng.randrange(2, 6))
        for episode in range(size - group % 2):
            segments: list[Segment] = []
            for _ in range(rng.choice((1, 1, 2))):
                ids, mask = list(prompt), [0] * len(prompt)
                for _ in range(rng.randrange(1, 4)):
                    sampled, observed = tokens(rng.randrange(1, 7), 3), tokens(rng.randrange(1, 5), 4)
                    ids += sampled + observed
                    mask += [1] * len(sampled) + [0] * len(observed)
                segments.append(make_segment(ids, mask, seed=rng.randrange(1 << 30)))
            if rng.random() < 0.3:
                segments.append(make_segment(prompt, [0] * len(prompt)))
            if rng.random() < 0.3:
                segments.append(make_segment((), ()))
            samples.append(Sample(tuple(segments), rng.uniform(-1, 1), group, episode, rng.random() < 0.2))
    return samples


def reference_gradients(
    model_dir: Path, adapter: Path | None, samples: Sequence[Sample], config: TrainingConfig, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by plain transformers + peft over right-padded rows, one row a segment.

    Those of the adapter, or of all weights where there is none.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).to(dtype)
    rows: list[tuple[Segment, Sample, float]] = []
    counts = [
        0 if config.mask_truncated and s.truncated else sum(sum(g.loss_mask[1:]) for g in s.segments) for s in samples
    ]
    weights = token_weights(counts, aggregation=config.aggregation, max_new_tokens=config.max_new_tokens)
    for sample, weight in zip(samples, weights, strict=True):
        rows += [(segment, sample, weight) for segment in sample.segments if len(segment.token_ids) > 1]
    width = max(len(segment.token_ids) for segment, *_ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (segment, *_) in enumerate(rows):
        ids[row, : len(segment.token_ids)] = torch.tensor(segment.token_ids)
        attention[row, : len(segment.token_ids)] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits
    loss = torch.zeros((), dtype=dtype)
    for row, (segment, sample, weight) in enumerate(rows):
        n = len(segment.token_ids)
        mask = torch.tensor(segment.loss_mask[1:], dtype=torch.bool)
        logprobs = torch.log_softmax(logits[row, : n - 1] / segment.temperature, dim=-1)
        new = logprobs.gather(1, ids[row, 1:n, None])[:, 0][mask]
        old = torch.tensor(segment.logprobs[1:], dtype=dtype)[mask]
        terms = policy_loss(
            new,
            old,
            torch.full_like(new, sample.advantage),
            torch.full_like(new, weight),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        loss = loss + terms.loss
    loss.backward()
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss.detach()), gradients
