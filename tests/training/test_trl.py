"""Our losses against those of TRL on the same tensors, computed by TRL's own code. Optional: TRL is no dependency.

To run it (any TRL from 1.16 on; the target folder keeps it out of the environment):

    pip install --no-deps --target /tmp/trl trl datasets dill multiprocess xxhash pandas python-dateutil
    PYTHONPATH=/tmp/trl pytest -s tests/training/test_trl.py
"""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from termrl.training.losses import policy_loss, sequence_means, token_weights

EPISODES, WIDTH = 12, 9

# TRL's loss and settings, and ours that say the same.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "grpo": ({"loss_type": "grpo"}, {}, "sequence_mean"),
    "dapo": ({"loss_type": "dapo"}, {}, "token_mean"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {}, "constant"),
    "dual clip": ({"loss_type": "dapo", "delta": 1.5}, {"dual_clip": 1.5}, "token_mean"),
    # TRL's bound is the weight itself, ours lies above 1
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.28}, {"surrogate": "cispo", "clip_low": 1.0}, "token_mean"),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"surrogate": "gspo"},
        "sequence_mean",
    ),
}


def theirs(inputs: dict[str, Tensor], logprobs: Tensor, settings: dict[str, Any]) -> Tensor:
    """The loss that TRL's trainer computes. Only what reads the model is replaced: it returns ``logprobs``."""
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is not importable; see this file's top")
    args = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "delta": None, **settings}
    trainer = object.__new__(module.GRPOTrainer)
    trainer.args = SimpleNamespace(delta=args["delta"], steps_per_generation=1, use_bias_correction_kl=False)
    trainer.loss_type = args["loss_type"]
    trainer.importance_sampling_level = args.get("importance_sampling_level", "token")
    trainer.epsilon_low, trainer.epsilon_high, trainer.beta = args["epsilon"], args["epsilon_high"], args["beta"]
    trainer.max_completion_length = WIDTH
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.use_vllm = trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = 1
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    return trainer._compute_loss(None, inputs)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_those_of_trl(name: str, seed: int) -> None:
    settings, own, aggregation = PAIRS[name]
    rng = random.Random(seed)
    counts = [rng.randrange(1, WIDTH + 1) for _ in range(EPISODES)]
    mask = torch.tensor([[int(i < n) for i in range(WIDTH)] for n in counts])
    generator = torch.Generator().manual_seed(seed)
    old = -4 * torch.rand(EPISODES, WIDTH, dtype=torch.float64, generator=generator)
    now = old + 0.4 * torch.randn(EPISODES, WIDTH, dtype=torch.float64, generator=generator)
    advantages = torch.randn(EPISODES, dtype=torch.float64, generator=generator)

    peer = now.clone().requires_grad_()
    prompt = torch.ones(EPISODES, 2, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    expected = theirs(inputs, peer, settings)
    expected.backward()

    ours = now.clone().requires_grad_()
    chosen = mask.bool()
    episode = torch.arange(EPISODES)[:, None].expand(-1, WIDTH)[chosen]
    weights = torch.tensor(token_weights(counts, aggregation=aggregation, max_new_tokens=WIDTH), dtype=torch.float64)  # type: ignore[arg-type]
    terms = policy_loss(
        ours[chosen],
        old[chosen],
        advantages[episode],
        weights[episode],
        **{"clip_low": 0.2, "clip_high": 0.28, **own},
        sequence_log_ratio=sequence_means((now - old)[chosen], episode, EPISODES)[episode],
    )
    terms.loss.backward()
    assert peer.grad is not None and ours.grad is not None
    gap = float((ours.grad - peer.grad).norm() / peer.grad.norm())
    print(f"{name}: loss {float(terms.loss - expected):.1e}, gradient {gap:.1e} (relative)")
    assert float(terms.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12, abs=1e-12)
    assert gap <= 1e-12
