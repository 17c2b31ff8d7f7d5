"""Samples per second of the prefix-tree trainer against a padded forward/backward of the same rollouts.

The peer is plain transformers + peft: right-padded rows, sorted by length, SDPA attention, logits only from the
prompt's end on, the same LoRA, loss, precision and threads, at the best of its micro-batches 1, 2, 4 and 8. Its
optimiser step is not counted; the trainer's is. Tokens are random, so no two samples share anything by chance.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._report import Figure, report
from termrl.capture.segments import Segment
from termrl.training.advantages import Sample
from termrl.training.config import TrainingConfig

if TYPE_CHECKING:
    from torch import Tensor

OPENING, PROMPT, SAMPLED, OBSERVED = 300, 40, 15, 20
GROUPS, GROUP_SIZE, MAX_TURNS = 8, 8, 3
MICRO_BATCHES = (1, 2, 4, 8)


def rollouts(vocabulary: int, *, groups: int = GROUPS, seed: int = 0) -> list[Sample]:
    """Samples with the shape of first-steps: one opening, a prompt a group, one to three turns."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(n)]

    opening = tokens(OPENING)
    samples: list[Sample] = []
    for group in range(groups):
        prompt = opening + tokens(PROMPT)
        for episode in range(GROUP_SIZE):
            turns = rng.randint(1, MAX_TURNS)
            ids, mask = list(prompt), [0] * len(prompt)
            for turn in range(turns):
                observed = OBSERVED if turn + 1 < turns else 0
                ids += tokens(SAMPLED + observed)
                mask += [1] * SAMPLED + [0] * observed
            logprobs = tuple(-10.8 if sampled else 0.0 for sampled in mask)
            versions = tuple(0 if sampled else -1 for sampled in mask)
            segment = Segment(f"{group}-{episode}", tuple(ids), tuple(mask), logprobs, versions, 0.8, turns)
            samples.append(Sample((segment,), 0.5 if episode % 2 else -0.5, group, episode))
    return samples


class Padded:
    """The peer."""

    def __init__(self, model_dir: Path, adapter: Path) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
        self.model: Any = PeftModel.from_pretrained(base, adapter, is_trainable=True)

    def gradients(self, samples: Sequence[Sample], micro_batch: int) -> dict[str, Tensor]:
        """Forward and backward over all samples; the gradients under peft's names."""
        self.model.zero_grad(set_to_none=True)
        ordered = sorted(samples, key=lambda sample: len(sample.segments[0].token_ids))
        total = sum(sample.segments[0].sampled for sample in samples)
        for start in range(0, len(ordered), micro_batch):
            self._backward(ordered[start : start + micro_batch], total)
        named = self.model.named_parameters()
        return {name.replace(".default", ""): p.grad for name, p in named if p.grad is not None}

    def _backward(self, part: Sequence[Sample], total: int) -> None:
        import torch

        from termrl.training.losses import policy_loss

        segments = [sample.segments[0] for sample in part]
        width = max(len(segment.token_ids) for segment in segments)
        keep = width - OPENING - PROMPT + 1

        def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
            return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)

        ids = padded([segment.token_ids for segment in segments], torch.long)
        attention = padded([[1] * len(segment.token_ids) for segment in segments], torch.long)
        mask = padded([segment.loss_mask for segment in segments], torch.bool)[:, -keep + 1 :]
        old = padded([segment.logprobs for segment in segments], torch.float32)[:, -keep + 1 :]
        advantage = torch.tensor([sample.advantage for sample in part])[:, None].expand_as(old)
        logits = self.model(input_ids=ids, attention_mask=attention, logits_to_keep=keep, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1] / segments[0].temperature, dim=-1)
        new = logprobs.gather(-1, ids[:, -keep + 1 :, None])[..., 0]
        weight = torch.full((int(mask.sum()),), 1.0 / total)
        policy_loss(new[mask], old[mask], advantage[mask], weight, clip_low=0.2, clip_high=0.28).loss.backward()


def relative_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of ``right``, over all entries."""
    if left.keys() != right.keys():
        raise ValueError("the two gradients are of different parameters")
    gap = sum(float((left[name] - right[name]).double().pow(2).sum()) for name in right)
    return (gap / sum(float(tensor.double().pow(2).sum()) for tensor in right.values())) ** 0.5


def measure(model_dir: Path, *, threads: int | None, peer_samples: int) -> list[Figure]:
    """Measure both in one run, taking turns; of each the best counts, which is what other load disturbs least."""
    import torch

    from termrl.training.trainer import Trainer

    if threads is not None:
        torch.set_num_threads(threads)
    trainer = Trainer(model_dir, TrainingConfig(), seed=0)
    vocabulary = trainer.vocabulary
    state = trainer.state_dict()
    for tensor in state["tensors"].values():
        tensor += 0.01 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    trainer.load_state_dict(state)
    samples = rollouts(vocabulary)
    part = random.Random(0).sample(samples, peer_samples)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_adapter(Path(folder))
        peer = Padded(model_dir, Path(folder))
    error = relative_difference(trainer.gradients(part[:8]), peer.gradients(part[:8], 8))

    updates = [trainer.update(samples)]
    rates: dict[int, float] = {}
    for micro_batch in MICRO_BATCHES:
        started = time.perf_counter()
        peer.gradients(part, micro_batch)
        rates[micro_batch] = len(part) / (time.perf_counter() - started)
        print(f"padded, micro-batch {micro_batch}: {rates[micro_batch]:.3f} samples/s", file=sys.stderr)
        if micro_batch in MICRO_BATCHES[1::2]:
            updates.append(trainer.update(samples))
        print(f"trainer: {len(samples) / updates[-1].seconds:.3f} samples/s", file=sys.stderr)

    first, seconds = updates[0], min(update.seconds for update in updates)
    own, best = len(samples) / seconds, max(rates.values())
    padded_tokens = sum(len(sample.segments[0].token_ids) for sample in samples)
    return [
        Figure("trainer_samples_per_s", own, "samples/s", "≥ 3 ×", own >= 3 * best, best, own / best),
        Figure(
            "trainer_tokens_computed",
            first.tokens_computed,
            "tokens",
            "fewer",
            first.tokens_computed < padded_tokens,
            padded_tokens,
            padded_tokens / first.tokens_computed,
        ),
        Figure("trainer_gradient_difference", error, "relative", "≤ 1e-4", error <= 1e-4),
        Figure("trainer_update_s", seconds, "s for 64 samples", "", True),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder; default: the bundled model")
    parser.add_argument("--threads", type=int, help="intra-op threads of both; default: torch's")
    parser.add_argument("--peer-samples", type=int, default=8, help="samples of the 64 that the peer is timed on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    model_dir = arguments.model
    if model_dir is None:
        from termrl.engine.bundled import ensure_model

        model_dir = ensure_model()
    figures = measure(model_dir, threads=arguments.threads, peer_samples=arguments.peer_samples)
    report("Trainer: prefix tree against padded rows", figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
