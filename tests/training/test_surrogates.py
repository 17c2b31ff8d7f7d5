"""cispo, gspo, dual clip and the sequence mask: by hand, against loops over episodes, and through the trainer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from termrl.training.advantages import Sample
from termrl.training.losses import LossTerms, geometric_mask, policy_loss, sequence_means
from tests.training.support import make_samples
from tests.training.test_trainer import distance, make_trainer, same, with_captured

BOUNDS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(ratio: float, advantage: float, **options: Any) -> tuple[LossTerms, float]:
    """The loss of one token with logprob -2 + log ratio, and its slope in the logprob."""
    old = tensor(-2.0)
    new = (old + math.log(ratio)).requires_grad_()
    terms = policy_loss(new, old, tensor(advantage), tensor(1.0), **{**BOUNDS, **options})
    terms.loss.backward()
    assert new.grad is not None
    return terms, float(new.grad)


# ratio, advantage, loss, slope, whether a bound acted; bounds 0.8 and 1.28, c = 3.
DUAL = [
    (2.5, -1.0, 2.5, 2.5, False),
    (3.5, -1.0, 3.0, 0.0, True),
    (4.0, -2.0, 6.0, 0.0, True),
    (4.0, 1.0, -1.28, 0.0, True),
    (0.5, -1.0, 0.8, 0.0, True),
    (1.0, -1.0, 1.0, 1.0, False),
    (4.0, 0.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope", "acted"), DUAL)
def test_dual_clip_bounds_the_loss_of_negative_advantages_only(
    ratio: float, advantage: float, loss: float, slope: float, acted: bool
) -> None:
    terms, got = one_token(ratio, advantage, dual_clip=3.0)
    assert float(terms.loss.detach()) == pytest.approx(loss)
    assert got == pytest.approx(slope, abs=1e-12)
    assert terms.clipped == acted


# ratio, advantage, slope: -clip(ratio, 0.8, 1.28) · A; the loss is the slope times the logprob.
CISPO = [
    (1.0, 1.0, -1.0, False),
    (1.2, -0.5, 0.6, False),
    (1.5, 1.0, -1.28, True),
    (1.5, -1.0, 1.28, True),
    (0.5, 1.0, -0.8, True),
    (0.5, -2.0, 1.6, True),
]


@pytest.mark.parametrize(("ratio", "advantage", "slope", "acted"), CISPO)
def test_cispo_bounds_the_weight_and_keeps_every_tokens_gradient(
    ratio: float, advantage: float, slope: float, acted: bool
) -> None:
    terms, got = one_token(ratio, advantage, surrogate="cispo")
    assert got == pytest.approx(slope)
    assert float(terms.loss.detach()) == pytest.approx(slope * (-2.0 + math.log(ratio)))
    assert terms.clipped == acted


def test_cispo_without_a_lower_bound_keeps_small_weights() -> None:
    assert one_token(0.25, 1.0, surrogate="cispo", clip_low=1.0)[1] == pytest.approx(-0.25)


def test_gspo_takes_the_geometric_mean_of_an_episodes_ratios() -> None:
    old = tensor(-1.0, -1.0, -1.0)
    new = (old + tensor(math.log(2.0), math.log(0.5), math.log(1.1**3))).requires_grad_()
    own = sequence_means(new.detach() - old, torch.zeros(3, dtype=torch.long), 1)
    assert float(own.exp()) == pytest.approx(1.1)
    terms = policy_loss(
        new,
        old,
        tensor(2.0, 2.0, 2.0),
        tensor(*[1 / 3] * 3),
        surrogate="gspo",
        sequence_log_ratio=own[[0, 0, 0]],
        **BOUNDS,
    )
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(-2.2)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2.2 / 3] * 3)  # d s / d logprob = s / length
    assert terms.clipped == 0


def test_gspo_clips_whole_episodes() -> None:
    old = tensor(-1.0, -1.0)
    new = (old + tensor(math.log(3.0), math.log(0.9))).requires_grad_()
    own = sequence_means(new.detach() - old, torch.zeros(2, dtype=torch.long), 1)[[0, 0]]
    terms = policy_loss(
        new, old, tensor(1.0, 1.0), tensor(0.5, 0.5), surrogate="gspo", sequence_log_ratio=own, **BOUNDS
    )
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(-1.28)
    assert terms.clipped == 2
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, 0.0]


def test_gspo_without_the_sequences_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_log_ratio"):
        one_token(1.0, 1.0, surrogate="gspo")


@pytest.mark.parametrize(
    ("mean", "kept"), [(0.0, True), (0.009, True), (0.011, False), (-0.009, True), (-0.011, False)]
)
def test_the_mask_keeps_geometric_means_within_its_bounds(mean: float, kept: bool) -> None:
    assert geometric_mask(tensor(mean), math.exp(-0.01), math.exp(0.01)).tolist() == [kept]


def test_a_rejected_token_brings_nothing_and_is_counted() -> None:
    keep = torch.tensor([True, False])
    new = tensor(-1.0, -1.0).requires_grad_()
    terms = policy_loss(
        new,
        tensor(-1.0, -5.0),
        tensor(1.0, 1.0),
        tensor(0.5, 0.5),
        keep=keep,
        reference=tensor(-1.5, -9.0),
        kl_coef=0.1,
        **BOUNDS,
    )
    terms.loss.backward()
    assert new.grad is not None
    assert new.grad[1] == 0.0 != new.grad[0]
    assert (terms.rejected, terms.clipped) == (1, 0)
    assert float(terms.loss.detach()) == pytest.approx(0.5 * (-1.0 + 0.1 * (math.exp(-0.5) - 1 + 0.5)))


def in_loops(
    new: Sequence[Tensor],
    old: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    surrogate: str,
    dual_clip: float | None,
    mask: tuple[float, float] | None,
    low: float,
    high: float,
) -> Tensor:
    """The batch's loss, token mean, as the papers write it: one episode and one token after the other."""
    total = sum(len(values) for values in old)
    loss = torch.zeros((), dtype=torch.float64)
    for logprobs, olds, advantage in zip(new, old, advantages, strict=True):
        logs = [logprobs[i] - olds[i] for i in range(len(olds))]
        mean = sum(logs) / len(logs)
        geometric = torch.exp(mean)  # type: ignore[arg-type]
        if mask is not None and not mask[0] <= float(geometric.detach()) <= mask[1]:
            continue
        for i, log in enumerate(logs):
            ratio = geometric if surrogate == "gspo" else torch.exp(log)
            bounded = ratio.clamp(low, high)
            if surrogate == "cispo":
                loss = loss - bounded.detach() * advantage * logprobs[i] / total
                continue
            objective = torch.minimum(ratio * advantage, bounded * advantage)
            if dual_clip is not None and advantage < 0:
                objective = torch.maximum(objective, torch.tensor(dual_clip * advantage, dtype=torch.float64))
            loss = loss - objective / total
    return loss


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    surrogate=st.sampled_from(["clip", "cispo", "gspo"]),
    dual=st.booleans(),
    mask=st.sampled_from([None, (0.9, 1.1)]),
)
def test_every_loss_equals_loops_over_episodes_in_float64(
    seed: int, surrogate: Any, dual: bool, mask: tuple[float, float] | None
) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 6) for _ in range(5)]
    olds = [[rng.uniform(-4, -0.1) for _ in range(n)] for n in lengths]
    advantages = [rng.uniform(-1, 1) for _ in lengths]
    flat = tensor(*[value + rng.gauss(0, rng.choice((0.02, 0.7))) for own in olds for value in own])
    dual_clip = 1.5 if dual and surrogate != "cispo" else None

    slow = flat.clone().requires_grad_()
    expected = in_loops(
        slow.split(lengths), olds, advantages, surrogate=surrogate, dual_clip=dual_clip, mask=mask, low=0.8, high=1.28
    )
    if expected.requires_grad:
        expected.backward()

    quick = flat.clone().requires_grad_()
    old = tensor(*[value for own in olds for value in own])
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    means = sequence_means(flat - old, episode, len(lengths))
    terms = policy_loss(
        quick,
        old,
        torch.tensor(advantages, dtype=torch.float64)[episode],
        torch.full_like(old, 1 / len(old)),
        surrogate=surrogate,
        dual_clip=dual_clip,
        sequence_log_ratio=means[episode],
        keep=None if mask is None else geometric_mask(means, *mask)[episode],
        **BOUNDS,
    )
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    wanted = torch.zeros_like(flat) if slow.grad is None else slow.grad
    torch.testing.assert_close(quick.grad, wanted, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("surrogate", ["cispo", "gspo"])
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
def test_absurd_ratios_never_give_nan(surrogate: Any, gap: float) -> None:
    new = torch.tensor([-1.0 + gap], requires_grad=True)
    terms = policy_loss(
        new,
        torch.tensor([-1.0]),
        torch.tensor([-1.0]),
        torch.tensor([1.0]),
        surrogate=surrogate,
        sequence_log_ratio=torch.tensor([gap]),
        dual_clip=3.0 if surrogate == "gspo" else None,
        **BOUNDS,
    )
    terms.loss.backward()
    assert new.grad is not None
    assert math.isfinite(float(terms.loss.detach()))
    assert math.isfinite(float(new.grad))


# -- through the trainer --------------------------------------------------------------------------------------------

WHOLE_EPISODE: list[dict[str, Any]] = [
    {"loss": "gspo", "aggregation": "sequence_mean"},
    {"sequence_mask": [0.9, 1.12]},
    {"loss": "gspo", "sequence_mask": [0.9, 1.12], "dual_clip": 1.02},
    {"loss": "gspo", "sequence_mask": [0.9, 1.12], "old_logprobs": "recomputed", "tis_cap": 1.02},
]
LOSSES: list[dict[str, Any]] = [{"loss": "cispo", "clip_high": 0.1}, {"dual_clip": 1.02}, *WHOLE_EPISODE]


def near(model: Path, seed: int) -> list[Sample]:
    """Samples whose captured logprobs are near the trainer's, apart by another amount in each episode and segment."""
    trainer = make_trainer(model, dtype="float64")
    samples = make_samples(seed)
    rng = random.Random(seed)
    shifted = [
        [values + own + rng.gauss(0, 0.05) for values in segments]
        for segments, own in ((segments, rng.gauss(0, 0.12)) for segments in trainer.logprobs(samples))
    ]
    return with_captured(samples, shifted)


@pytest.mark.parametrize("settings_", LOSSES)
def test_cutting_the_batch_does_not_change_the_gradient(tiny: Path, settings_: dict[str, Any]) -> None:
    samples = near(tiny, 3)
    assert any(len(sample.segments) > 1 for sample in samples)
    whole = make_trainer(tiny, dtype="float64", micro_batch_tokens=100_000, **settings_).gradients(samples)
    for tokens in (1, 40):
        cut = make_trainer(tiny, dtype="float64", micro_batch_tokens=tokens, **settings_)
        assert distance(cut.gradients(samples), whole) <= 1e-9


@pytest.mark.parametrize("settings_", LOSSES)
def test_the_order_of_episodes_changes_no_bit(tiny: Path, settings_: dict[str, Any]) -> None:
    samples = near(tiny, 5)
    shuffled = [replace(sample, segments=tuple(reversed(sample.segments))) for sample in samples]
    random.Random(1).shuffle(shuffled)
    trainer = make_trainer(tiny, micro_batch_tokens=60, **settings_)
    assert same(trainer.gradients(samples), trainer.gradients(shuffled))


def test_each_loss_gives_another_gradient(tiny: Path) -> None:
    samples = near(tiny, 6)
    gradients = [make_trainer(tiny, dtype="float64", **chosen).gradients(samples) for chosen in ({}, *LOSSES)]
    for index, left in enumerate(gradients):
        assert all(distance(left, right) > 1e-3 for right in gradients[:index])


def test_a_masked_episode_equals_one_with_advantage_zero(tiny: Path) -> None:
    trainer = make_trainer(tiny, dtype="float64", sequence_mask=[0.9, 1.1], micro_batch_tokens=50)
    samples = make_samples(7)
    now = trainer.logprobs(samples)
    far = with_captured(samples[:3], [[values - 0.5 for values in own] for own in now[:3]])
    near_ = with_captured(samples[3:], now[3:])
    muted = [replace(sample, advantage=0.0) for sample in far]
    assert distance(trainer.gradients([*far, *near_]), trainer.gradients([*muted, *near_])) <= 1e-12
    tokens = [sum(sum(segment.loss_mask) for segment in sample.segments) for sample in samples]
    assert trainer.update([*far, *near_]).sequence_masked == pytest.approx(sum(tokens[:3]) / sum(tokens))


def test_a_batch_that_the_mask_rejects_whole_is_skipped(tiny: Path) -> None:
    trainer = make_trainer(tiny, sequence_mask=[0.999, 1.001])
    before = trainer.merged_weights()
    metrics = trainer.update(make_samples(8))
    assert (metrics.skipped, metrics.sequence_masked, trainer.step) == ("sequence_mask", 1.0, 0)
    assert same(trainer.merged_weights(), before)


def test_the_mask_of_the_first_step_holds_for_the_second(tiny: Path) -> None:
    options: dict[str, Any] = {"sequence_mask": [0.9, 1.1], "lr": 0.05, "warmup_steps": 0, "micro_batch_tokens": 50}
    once, twice = make_trainer(tiny, **options), make_trainer(tiny, updates_per_batch=2, **options)
    samples = near(tiny, 9)
    first = once.update(samples).sequence_masked
    assert 0 < first < 1
    assert twice.update(samples).sequence_masked == pytest.approx(first)
    assert once.update(samples).sequence_masked != pytest.approx(first)


@pytest.mark.parametrize("settings_", LOSSES[:3])
def test_a_second_step_on_the_batch_is_taken_against_the_same_old_logprobs(
    tiny: Path, settings_: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"lr": 0.01, "warmup_steps": 0, "micro_batch_tokens": 50, "dtype": "float64"}
    once, twice = (make_trainer(tiny, **{**options, **settings_, "updates_per_batch": n}) for n in (1, 2))
    samples = near(tiny, 10)
    twice.update(samples)
    once.update(samples)
    once.update(samples)
    assert distance(once.merged_weights(), twice.merged_weights()) <= 1e-12
