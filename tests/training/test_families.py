"""Other model families than the bundled one, through the engine and the trainer together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from termrl.capture.segments import Segment
from termrl.capture.upstreams import GenerateRequest, GenerateResult, SamplingParams
from termrl.engine.transformers import EmbeddedEngine
from termrl.training.advantages import Sample, group_advantages
from termrl.training.config import TrainingConfig
from termrl.training.trainer import Trainer
from tests.engine.tiny import make_model, save_tokenizer

PROMPT = tuple(range(20, 44))
WANTED = frozenset(range(3, 100))


def roll_out(engine: EmbeddedEngine, step: int, count: int = 24) -> list[tuple[Segment, float]]:
    """Two turns each, of 6 tokens; the reward is how many of them lie in the wanted third of the vocabulary."""

    def ask(index: int, prompt: tuple[int, ...], turn: int) -> GenerateRequest:
        sampling = SamplingParams(temperature=0.8, max_tokens=6, seed=1000 * step + 2 * index + turn)
        return GenerateRequest(f"{step}-{index}", prompt, sampling, index)

    first = engine.generate([ask(index, PROMPT, 0) for index in range(count)])
    prompts = [PROMPT + done.token_ids + (7, 8, 9) for done in first]
    second = engine.generate([ask(index, prompt, 1) for index, prompt in enumerate(prompts)])
    return [
        (segment(a, b, step), sum(token in WANTED for token in a.token_ids + b.token_ids) / 12)
        for a, b in zip(first, second, strict=True)
    ]


def segment(first: GenerateResult, second: GenerateResult, step: int) -> Segment:
    parts = [
        (PROMPT, None),
        (first.token_ids, first.logprobs),
        ((7, 8, 9), None),
        (second.token_ids, second.logprobs),
    ]
    ids = tuple(token for tokens, _ in parts for token in tokens)
    mask = tuple(int(sampled is not None) for tokens, sampled in parts for _ in tokens)
    logprobs = tuple(value for tokens, sampled in parts for value in (sampled or (0.0,) * len(tokens)))
    versions = tuple(step if trained else -1 for trained in mask)
    return Segment("s", ids, mask, logprobs, versions, 0.8, 2)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.05}, {"full": True, "lr": 0.006}],
    ids=["lora", "full"],
)
def test_engine_and_trainer_agree_and_the_policy_learns(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    model = make_model(kind, initializer_range=0.08)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    engine = EmbeddedEngine(tmp_path, threads=1)
    trainer = Trainer(tmp_path, TrainingConfig.model_validate({"warmup_steps": 0, **settings}), seed=0)
    rewards: list[float] = []
    for step in range(16):
        played = roll_out(engine, step)
        advantages = group_advantages([reward for _, reward in played])
        samples = [
            Sample((own,), a or 0.0, 0, i) for i, ((own, _), a) in enumerate(zip(played, advantages, strict=True))
        ]
        rewards.append(sum(reward for _, reward in played) / len(played))
        metrics = trainer.update(samples)
        if metrics.skipped:  # all episodes alike: solved
            break
        assert metrics.logprob_diff <= 1e-4
        assert metrics.clip_fraction == 0
        engine.set_weights(trainer.merged_weights(), step + 1)
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.12, rewards
