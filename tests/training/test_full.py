"""Full fine-tuning: every weight is trained, over the same packed passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from termrl.engine.transformers import EmbeddedEngine
from termrl.errors import ModelError
from termrl.training import checkpoints
from termrl.training.advantages import Sample
from termrl.training.config import FULL_LR, TrainingConfig
from termrl.training.trainer import Trainer
from tests.engine.tiny import make_model, save_tokenizer
from tests.training.support import make_samples, make_segment, reference_gradients, save_tiny_model
from tests.training.test_trainer import distance, make_trainer, same, with_captured


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-5)])
def test_gradient_of_every_weight_equals_that_of_padded_rows_in_transformers(
    tmp_path: Path, kind: str, dtype: str, bound: float
) -> None:
    model = save_tiny_model(tmp_path / "model", kind)
    trainer = make_trainer(model, moved=False, full=True, dtype=dtype, micro_batch_tokens=60)
    samples = make_samples(3)
    _, expected = reference_gradients(model, None, samples, trainer.config, getattr(torch, dtype))
    got = trainer.gradients(samples)
    assert distance(got, expected) <= bound
    for name, gradient in expected.items():  # small tensors too: each on its own, not lost in the norm of all
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=2 * bound * float(gradient.abs().max()) + 1e-9)


def test_splitting_and_threads_do_not_change_the_gradient(tiny: Path) -> None:
    samples = make_samples(4)
    whole = make_trainer(tiny, full=True, dtype="float64", micro_batch_tokens=100_000).gradients(samples)
    for tokens in (1, 40):
        assert (
            distance(
                make_trainer(tiny, full=True, dtype="float64", micro_batch_tokens=tokens).gradients(samples), whole
            )
            <= 1e-9
        )
    torch.set_num_threads(2)
    trainer = make_trainer(tiny, full=True, micro_batch_tokens=40)
    first = trainer.gradients(samples)
    assert distance(first, whole) <= 1e-4
    assert all(same(trainer.gradients(samples), first) for _ in range(3))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_merged_weights_are_all_weights_and_keep_their_values(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    model = save_tiny_model(tmp_path / "model", kind)
    trainer = make_trainer(model, moved=False, full=True, lr=0.01)
    base = load_file(model / "model.safetensors")
    kept = trainer.merged_weights()
    assert same(kept, base)
    trainer.update(make_samples(0))
    assert same(kept, base)
    now = trainer.merged_weights()
    assert [name for name, weight in now.items() if torch.equal(weight, base[name])] == []


def test_a_checkpoint_holds_a_model_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tmp_path / "model"
    make_model("qwen2").save_pretrained(model)
    save_tokenizer(model)
    trainer = Trainer(model, TrainingConfig(full=True, lr=0.01, warmup_steps=0), seed=0)
    trainer.update(make_samples(1))
    saved = checkpoints.load(checkpoints.save(tmp_path / "run", trainer, step=1))
    assert not saved.adapter.exists()
    loaded = AutoModelForCausalLM.from_pretrained(saved.model)
    assert loaded.dtype == torch.float32
    state = loaded.state_dict()
    assert same({name: state[name] for name in trainer.merged_weights()}, trainer.merged_weights())
    assert AutoTokenizer.from_pretrained(saved.model).chat_template
    other = EmbeddedEngine(saved.model, threads=1)
    engine = EmbeddedEngine(model, threads=1)
    engine.set_weights(trainer.merged_weights(), 1)
    assert torch.equal(engine._weights.embedding, other._weights.embedding)

    resumed = Trainer(model, trainer.config, seed=9)
    resumed.load_state_dict(saved.trainer)
    assert replace(resumed.update(make_samples(2)), seconds=0.0) == replace(
        trainer.update(make_samples(2)), seconds=0.0
    )
    assert same(resumed.merged_weights(), trainer.merged_weights())


def test_there_is_no_adapter_to_save(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny, full=True)
    assert trainer.adapter_weights() == {}
    with pytest.raises(ModelError, match="no adapter"):
        trainer.save_adapter(tmp_path / "adapter")


def test_it_learns_and_the_kl_holds_it_back(tiny: Path) -> None:
    def learn(**settings: Any) -> tuple[float, float]:
        trainer = make_trainer(tiny, moved=False, full=True, lr=0.003, warmup_steps=0, **settings)
        good = make_segment([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1])
        bad = make_segment([1, 2, 3, 7, 8, 9], [0, 0, 0, 1, 1, 1])
        samples = [Sample((good,), 1.0, 0, 0), Sample((bad,), -1.0, 0, 1)]
        before = [float(own[0].sum()) for own in trainer.logprobs(samples)]
        for _ in range(4):
            samples = with_captured(samples, trainer.logprobs(samples))
            trainer.update(samples)
        after = [float(own[0].sum()) for own in trainer.logprobs(samples)]
        assert after[0] > before[0]
        assert after[1] < before[1]
        base = [float(own[0].sum()) for own in trainer.logprobs(samples, pristine=True)]
        assert base == pytest.approx(before)
        return after[0] - before[0], trainer.update(samples).kl_reference

    free, none = learn()
    held, divergence = learn(kl_coef=0.9)
    assert held < free
    assert divergence > 0 == none


def test_the_default_learning_rate_is_one_that_a_whole_model_survives() -> None:
    assert TrainingConfig(full=True).lr == TrainingConfig.model_validate({"full": True}).lr == FULL_LR
    assert TrainingConfig(full=True, lr=4e-4).lr == TrainingConfig().lr == 4e-4
    saved = TrainingConfig(full=True).model_dump(mode="json")
    assert TrainingConfig.model_validate(saved).lr == FULL_LR


def test_a_state_of_a_low_rank_update_is_refused(tiny: Path) -> None:
    with pytest.raises(ModelError, match="does not fit"):
        make_trainer(tiny, full=True, moved=False).load_state_dict(make_trainer(tiny).state_dict())
