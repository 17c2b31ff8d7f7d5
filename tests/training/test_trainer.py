from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from termrl.errors import CaptureError, ModelError
from termrl.training.advantages import Sample
from termrl.training.config import LoraSettings, TrainingConfig
from termrl.training.trainer import Trainer
from tests.training.support import make_samples, make_segment, reference_gradients, save_tiny_model


def make_trainer(model: Path, *, seed: int = 1, moved: bool = True, **settings: Any) -> Trainer:
    """A trainer whose low-rank update is not zero (unless ``moved`` is false), so that every path carries gradient."""
    trainer = Trainer(model, TrainingConfig.model_validate(settings), seed=seed)
    if moved:
        state = trainer.state_dict()
        generator = torch.Generator().manual_seed(5)
        for tensor in state["tensors"].values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        trainer.load_state_dict(state)
    return trainer


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Relative difference of two gradients, over all their entries."""
    assert left.keys() == right.keys()
    gap = sum(float((left[name] - right[name]).double().pow(2).sum()) for name in right)
    return (gap / sum(float(tensor.double().pow(2).sum()) for tensor in right.values())) ** 0.5


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def with_captured(samples: list[Sample], logprobs: list[list[Tensor]]) -> list[Sample]:
    """The samples as an engine of these logprobs would have captured them."""
    result = []
    for sample, own in zip(samples, logprobs, strict=True):
        segments = []
        for segment, values in zip(sample.segments, own, strict=True):
            left = iter(values.tolist())
            captured = tuple(next(left) if mask else 0.0 for mask in segment.loss_mask)
            segments.append(replace(segment, logprobs=captured))
        result.append(replace(sample, segments=tuple(segments)))
    return result


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-5)])
def test_gradient_equals_that_of_padded_rows_in_transformers_and_peft(
    tmp_path: Path, kind: str, dtype: str, bound: float
) -> None:
    model = save_tiny_model(tmp_path / "model", kind)
    trainer = make_trainer(model, dtype=dtype, micro_batch_tokens=60)
    trainer.save_adapter(tmp_path / "adapter")
    samples = make_samples(3)
    _, expected = reference_gradients(model, tmp_path / "adapter", samples, trainer.config, getattr(torch, dtype))
    assert distance(trainer.gradients(samples), expected) <= bound


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": "sequence_mean"},
        {"aggregation": "constant", "max_new_tokens": 30},
        {"mask_truncated": True},
        {"mask_truncated": True, "aggregation": "sequence_mean"},
    ],
)
def test_each_aggregation_and_mask_equals_the_padded_reference(
    tiny: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    trainer = make_trainer(tiny, dtype="float64", micro_batch_tokens=50, **settings)
    trainer.save_adapter(tmp_path)
    samples = make_samples(4)
    assert any(sample.truncated for sample in samples)
    _, expected = reference_gradients(tiny, tmp_path, samples, trainer.config, torch.float64)
    assert distance(trainer.gradients(samples), expected) <= 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-5)])
@pytest.mark.parametrize("seed", range(4))
def test_splitting_into_micro_batches_does_not_change_the_gradient(
    tiny: Path, dtype: str, bound: float, seed: int
) -> None:
    samples = make_samples(seed)
    whole = make_trainer(tiny, dtype=dtype, micro_batch_tokens=100_000).gradients(samples)
    for tokens in (1, 25, 90):
        assert distance(make_trainer(tiny, dtype=dtype, micro_batch_tokens=tokens).gradients(samples), whole) <= bound


def test_a_long_tree_of_many_tiles_equals_its_sequences_one_by_one(tiny: Path) -> None:
    rng = random.Random(7)
    prompt = [rng.randrange(97) for _ in range(20)]
    samples = []
    for index in range(8):
        ids = prompt + [rng.randrange(3) for _ in range(150)]
        samples.append(Sample((make_segment(ids, [0] * 20 + [1] * 150, seed=index),), rng.uniform(-1, 1), 0, index))
    whole = make_trainer(tiny, dtype="float64", micro_batch_tokens=100_000).gradients(samples)
    assert distance(make_trainer(tiny, dtype="float64", micro_batch_tokens=1).gradients(samples), whole) <= 1e-10


def test_the_order_of_episodes_changes_no_bit(tiny: Path) -> None:
    samples = make_samples(5)
    shuffled = [replace(sample, segments=tuple(reversed(sample.segments))) for sample in samples]
    random.Random(1).shuffle(shuffled)
    trainer = make_trainer(tiny, micro_batch_tokens=60)
    assert same(trainer.gradients(samples), trainer.gradients(shuffled))


def test_segments_without_a_sampled_token_change_no_bit(tiny: Path) -> None:
    samples = make_samples(6)
    empty = (make_segment((), ()), make_segment((5,), (0,)), make_segment((5, 6, 7), (0, 0, 0), temperature=0.0))
    padded = [replace(sample, segments=empty + sample.segments + empty) for sample in samples]
    trainer = make_trainer(tiny, micro_batch_tokens=60)
    assert same(trainer.gradients(samples), trainer.gradients(padded))


def test_a_masked_truncated_episode_equals_its_absence_under_token_mean(tiny: Path) -> None:
    samples = [replace(sample, truncated=False) for sample in make_samples(7)]
    cut = replace(samples[0], truncated=True, advantage=5.0)
    trainer = make_trainer(tiny, mask_truncated=True)
    assert same(trainer.gradients([cut, *samples[1:]]), trainer.gradients(samples[1:]))


def test_logprobs_equal_those_of_transformers_at_the_sampling_temperature(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        state = model.state_dict()
        for name, weight in trainer.merged_weights().items():
            state[name].copy_(weight)
        segment = make_segment(list(range(20, 50)), [0] * 10 + [1] * 20, temperature=0.7)
        logits = model(input_ids=torch.tensor([segment.token_ids])).logits[0] / 0.7
    expected = torch.log_softmax(logits, -1)[9:29].gather(1, torch.arange(30, 50)[:, None])[:, 0]
    ((mine,),) = trainer.logprobs([Sample((segment,), 1.0, 0, 0)])
    torch.testing.assert_close(mine, expected, atol=5e-5, rtol=0)


def test_logprob_diff_is_zero_against_an_engine_with_the_same_weights(tiny: Path) -> None:
    trainer = make_trainer(tiny)
    samples = with_captured(make_samples(8), trainer.logprobs(make_samples(8)))
    metrics = trainer.update(samples)
    assert metrics.logprob_diff <= 1e-5
    assert metrics.clip_fraction == 0
    assert metrics.tokens_trained == sum(segment.sampled for sample in samples for segment in sample.segments)
    off = with_captured(samples, [[values + 0.25 for values in own] for own in trainer.logprobs(samples)])
    assert trainer.update(off).logprob_diff == pytest.approx(0.25, abs=1e-5)


def test_two_updates_on_a_batch_keep_the_captured_logprobs_as_the_old_ones(tiny: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "warmup_steps": 0}
    twice, once = make_trainer(tiny, updates_per_batch=2, **settings), make_trainer(tiny, **settings)
    samples = with_captured(make_samples(9), once.logprobs(make_samples(9)))
    metrics = twice.update(samples)
    first, second = once.update(samples), once.update(samples)
    assert same(twice.merged_weights(), once.merged_weights())
    assert metrics.optimiser_steps == 2
    assert first.clip_fraction == 0 < second.clip_fraction
    assert metrics.clip_fraction == pytest.approx(second.clip_fraction / 2)
    assert metrics.kl > 0


def test_recomputed_logprobs_are_those_before_the_first_step(tiny: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "warmup_steps": 0, "updates_per_batch": 2}
    recomputed = make_trainer(tiny, dtype="float64", old_logprobs="recomputed", **settings)
    captured = make_trainer(tiny, dtype="float64", **settings)
    samples = make_samples(10)
    metrics = recomputed.update(samples)
    captured.update(with_captured(samples, captured.logprobs(samples)))
    assert distance(recomputed.merged_weights(), captured.merged_weights()) <= 1e-9
    assert metrics.logprob_diff > 0.1


def test_truncated_importance_scales_each_token_by_its_capped_ratio(tiny: Path) -> None:
    plain = make_trainer(tiny, dtype="float64", old_logprobs="recomputed")
    capped = make_trainer(tiny, dtype="float64", old_logprobs="recomputed", tis_cap=2.0)
    samples = make_samples(11)
    now = plain.logprobs(samples)
    for shift, factor in ((-0.3, 1.3498588075760032), (-1.0, 2.0), (0.5, 0.6065306597126334)):
        shifted = with_captured(samples, [[values + shift for values in own] for own in now])
        expected = {name: gradient * factor for name, gradient in plain.gradients(shifted).items()}
        assert distance(capped.gradients(shifted), expected) <= 1e-9


def test_kl_pulls_towards_the_base_model(tiny: Path) -> None:
    trainer = make_trainer(tiny, kl_coef=0.5, lr=0.01, warmup_steps=0)
    samples = [replace(sample, advantage=0.0) for sample in make_samples(12)]
    before = trainer.update(samples).kl_reference
    after = [trainer.update(samples).kl_reference for _ in range(10)]
    assert 0 < after[-1] < before
    assert make_trainer(tiny, moved=False, kl_coef=0.5).update(samples).kl_reference == pytest.approx(0, abs=1e-6)


def test_training_raises_what_was_rewarded_and_lowers_what_was_not(tiny: Path) -> None:
    trainer = make_trainer(tiny, moved=False, lr=0.01, warmup_steps=0)
    good = make_segment([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1])
    bad = make_segment([1, 2, 3, 7, 8, 9], [0, 0, 0, 1, 1, 1])
    samples = [Sample((good,), 1.0, 0, 0), Sample((bad,), -1.0, 0, 1)]
    samples = with_captured(samples, trainer.logprobs(samples))
    before = [float(own[0].sum()) for own in trainer.logprobs(samples)]
    trainer.update(samples)
    after = [float(own[0].sum()) for own in trainer.logprobs(samples)]
    assert after[0] > before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "no_episode"),
        ([Sample((), 1.0, 0, 0)], "no_loss_token"),
        ([Sample((make_segment((5,), (1,)),), 1.0, 0, 0)], "no_loss_token"),
        ([Sample((make_segment((1, 2), (0, 1)),), 1.0, 0, 0, truncated=True)], "no_loss_token"),
        ([Sample((make_segment((1, 2), (0, 1)),), 0.0, 0, 0)], "no_advantage"),
    ],
)
def test_a_batch_with_nothing_to_train_on_is_skipped_with_a_reason(
    tiny: Path, samples: list[Sample], reason: str
) -> None:
    trainer = make_trainer(tiny, mask_truncated=True)
    before = trainer.merged_weights()
    metrics = trainer.update(samples)
    assert metrics.skipped == reason
    assert metrics.optimiser_steps == trainer.step == 0
    assert same(trainer.merged_weights(), before)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"token_ids": (1, 2, 97)}, "vocabulary"),
        ({"token_ids": (1, -2, 3)}, "vocabulary"),
        ({"logprobs": (0.0, 0.0, float("nan"))}, "finite"),
        ({"logprobs": (0.0, 0.0, float("-inf"))}, "finite"),
    ],
)
def test_segments_that_cannot_be_trained_on_are_refused(tiny: Path, change: dict[str, Any], word: str) -> None:
    segment = replace(make_segment((1, 2, 3), (0, 0, 1)), **change)
    with pytest.raises(CaptureError, match=word):
        make_trainer(tiny).update([Sample((segment,), 1.0, 0, 0)])


def test_merged_weights_are_base_plus_scaled_update_and_do_not_drift(tiny: Path) -> None:
    from safetensors.torch import load_file

    trainer = make_trainer(tiny, moved=False, lora={"rank": 4, "alpha": 6.0})
    base = load_file(tiny / "model.safetensors")
    assert all(torch.equal(weight, base[name]) for name, weight in trainer.merged_weights().items())
    kept = trainer.merged_weights()
    for seed in range(5):
        trainer.update(make_samples(seed))
    assert all(torch.equal(weight, base[name]) for name, weight in kept.items())
    adapter = trainer.adapter_weights()
    for name, weight in trainer.merged_weights().items():
        layer = "base_model.model." + name.removesuffix(".weight")
        update = adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        assert not torch.equal(weight, base[name])
        torch.testing.assert_close(weight, base[name] + 1.5 * update, atol=1e-6, rtol=0)


def test_only_the_targets_are_trained(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny, dtype="float64", lora=LoraSettings(targets=("k_proj", "down_proj")).model_dump())
    samples = make_samples(13)
    trainer.save_adapter(tmp_path)
    _, expected = reference_gradients(tiny, tmp_path, samples, trainer.config, torch.float64)
    assert distance(trainer.gradients(samples), expected) <= 1e-5
    assert {name.split(".")[-2] for name in trainer.merged_weights()} == {"k_proj", "down_proj"}


def test_warm_up_raises_the_learning_rate_linearly(tiny: Path) -> None:
    trainer = make_trainer(tiny, lr=0.03, warmup_steps=3)
    assert [trainer.update(make_samples(0)).lr for _ in range(4)] == pytest.approx([0.01, 0.02, 0.03, 0.03])


def test_same_seed_same_bits(tiny: Path) -> None:
    runs = []
    for _ in range(2):
        trainer = make_trainer(tiny, moved=False, seed=3)
        metrics = [replace(trainer.update(make_samples(seed)), seconds=0.0) for seed in range(3)]
        runs.append((metrics, trainer.merged_weights()))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_another_seed_starts_elsewhere(tiny: Path) -> None:
    left, right = (make_trainer(tiny, moved=False, seed=seed).adapter_weights() for seed in (3, 4))
    assert not same(left, right)


def test_a_resumed_trainer_goes_on_with_the_same_bits(tiny: Path) -> None:
    whole, first = make_trainer(tiny, seed=3), make_trainer(tiny, seed=3)
    for seed in range(2):
        whole.update(make_samples(seed))
        first.update(make_samples(seed))
    resumed = make_trainer(tiny, seed=99)
    resumed.load_state_dict(first.state_dict())
    for seed in range(2, 4):
        assert replace(resumed.update(make_samples(seed)), seconds=0.0) == replace(
            whole.update(make_samples(seed)), seconds=0.0
        )
    assert same(resumed.merged_weights(), whole.merged_weights())


def test_a_state_of_other_settings_is_refused(tiny: Path) -> None:
    state = make_trainer(tiny, lora={"rank": 4}).state_dict()
    with pytest.raises(ModelError, match="does not fit"):
        make_trainer(tiny).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"model_type": "gpt2"}, "gpt2"), ({"hidden_act": "gelu"}, "gelu"), ({"attention_dropout": 0.1}, "dropout")],
)
def test_other_models_are_refused_by_name(tiny: Path, tmp_path: Path, change: dict[str, Any], word: str) -> None:
    config = json.loads((tiny / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=word):
        Trainer(tmp_path, TrainingConfig(), seed=0)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        Trainer(tmp_path, TrainingConfig(), seed=0)


def threads_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_packs_on_several_threads_give_the_same_gradient_and_the_same_bits_each_time(tiny: Path) -> None:
    samples = make_samples(14, groups=6, size=6)
    alone = make_trainer(tiny, dtype="float64").gradients(samples)
    trainer = make_trainer(tiny, dtype="float64", micro_batch_tokens=40)
    torch.set_num_threads(3)
    before = torch.get_num_threads(), threads_of_a_new_thread()
    first = trainer.gradients(samples)
    assert distance(first, alone) <= 1e-10
    assert all(same(trainer.gradients(samples), first) for _ in range(5))
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == before


def test_an_error_on_a_thread_is_raised(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("termrl.training.objective.policy_loss", fail)
    trainer = make_trainer(tiny, micro_batch_tokens=20)
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError, match="no such luck"):
        trainer.update(make_samples(0))
    assert trainer.step == 0


def test_neither_the_model_file_nor_gradients_stay_in_memory(tiny: Path) -> None:
    trainer = make_trainer(tiny)
    trainer.update(make_samples(0))
    assert str(tiny / "model.safetensors") not in Path("/proc/self/maps").read_text()
    assert all(parameter.grad is None for parameter in trainer._parameters)
