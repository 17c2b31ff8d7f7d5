"""A whole GRPO step on the path of miles: agent function, capture, reward, samples, update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from termrl.capture.render import renderer_for
from termrl.capture.server import serve
from termrl.cli import run as termrl
from termrl.engine.transformers import EmbeddedEngine
from termrl.engine.upstream import EmbeddedUpstream
from termrl.integrations.miles import keep_group, log_rollout
from termrl.training.advantages import Sample as Trained
from termrl.training.advantages import group_advantages
from termrl.training.config import TrainingConfig
from termrl.training.trainer import Trainer
from tests.endtoend.tiny import write_model
from tests.integrations.miles.fakemiles import FakeMiles, prompt_groups

_TRAINING = {"lr": 0.005, "warmup_steps": 0}


@pytest.mark.usefixtures("sandboxes")
async def test_a_step_raises_the_probability_of_what_was_rewarded(tasks: Path, tmp_path: Path) -> None:
    model, rows = write_model(tmp_path / "model"), tmp_path / "train.jsonl"
    assert termrl(["tasks", "rows", str(tasks), "-o", str(rows), "--include", "make-apple"]) == 0
    (row,) = map(json.loads, rows.read_text().splitlines())
    rows.write_text(json.dumps({**row, "prompt": [{"role": "system", "content": "Use bash."}]}))  # of a small window
    trainer = Trainer(model, TrainingConfig(**_TRAINING), seed=0, threads=1)
    upstream = EmbeddedUpstream(EmbeddedEngine(model, threads=1), schedule="continuous")
    sampling = {"max_new_tokens": 4, "temperature": 1.0, "top_k": None, "sampling_seed": 1, "stop_at_fence": True}
    try:
        async with (
            serve(upstream, renderer_for(model)) as server,
            FakeMiles(server.url, sampling=sampling, group_filter=lambda *a: (keep_group(*a), None)) as worker,
        ):
            found = await worker.rollout(prompt_groups(rows, samples=24), groups=1, at_once=1)
    finally:
        await upstream.aclose()
    (group,) = found.kept
    rewards = [played.reward for played in group]
    assert set(rewards) == {0.0, 1.0}
    samples = [
        Trained(played.segments, advantage, 0, played.index)
        for played, advantage in zip(group, group_advantages(rewards), strict=True)
        if advantage is not None
    ]
    update = trainer.update(samples)
    assert update.logprob_diff < 1e-4
    assert update.skipped is None and update.grad_norm > 0
    advantage_of_change = sum(
        float((after - before).sum()) * sample.advantage
        for sample in samples
        for after, before in zip(trainer.logprobs([sample])[0], _captured(sample), strict=True)
    )
    assert advantage_of_change > 0
    metrics: dict[str, float] = {}
    log_rollout(0, None, group, metrics, 1.0)
    assert metrics["agent/episodes"] == 24 and metrics["agent/fault_rate"] == 0.0


def _captured(sample: Trained) -> list[torch.Tensor]:
    return [
        torch.tensor([p for p, m in zip(segment.logprobs, segment.loss_mask, strict=True) if m])
        for segment in sample.segments
    ]
