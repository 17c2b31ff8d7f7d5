from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from termrl.training.losses import k3, policy_loss, token_weights, truncated_importance

BOUNDS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ratio, advantage, loss of the token, d loss / d logprob: worked out by hand for bounds 0.8 and 1.28.
HAND = [
    (1.0, 1.0, -1.0, -1.0),
    (1.0, -0.5, 0.5, 0.5),
    (1.2, 1.0, -1.2, -1.2),
    (1.5, 1.0, -1.28, 0.0),
    (1.5, -1.0, 1.5, 1.5),
    (0.5, 1.0, -0.5, -0.5),
    (0.5, -1.0, 0.8, 0.0),
    (0.9, -2.0, 1.8, 1.8),
    (1.27, 2.0, -2.54, -2.54),
    (1.29, 2.0, -2.56, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), HAND)
def test_clipped_surrogate_equals_values_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    old = tensor(-2.0)
    new = (old + math.log(ratio)).requires_grad_()
    terms = policy_loss(new, old, tensor(advantage), tensor(1.0), **BOUNDS)
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(loss)
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(slope, abs=1e-12)
    assert terms.clipped == (slope == 0.0)


def test_loss_is_the_weighted_sum() -> None:
    old = tensor(*[-2.0] * len(HAND))
    new = old + torch.log(tensor(*[row[0] for row in HAND]))
    weights = tensor(*[0.1 * (i + 1) for i in range(len(HAND))])
    terms = policy_loss(new, old, tensor(*[row[1] for row in HAND]), weights, **BOUNDS)
    assert float(terms.loss.detach()) == pytest.approx(sum(0.1 * (i + 1) * row[2] for i, row in enumerate(HAND)))
    assert terms.clipped == 3


def test_k3_equals_values_by_hand() -> None:
    assert k3(tensor(0.0, math.log(2.0), -math.log(2.0))).tolist() == pytest.approx(
        [0.0, 1 - math.log(2.0), -0.5 + math.log(2.0)]
    )


def test_kl_to_the_reference_enters_the_loss_with_its_gradient() -> None:
    new = tensor(-1.0).requires_grad_()
    reference = tensor(-1.0 + math.log(1.5))
    terms = policy_loss(new, tensor(-1.0), tensor(0.0), tensor(1.0), reference=reference, kl_coef=0.1, **BOUNDS)
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(0.1 * (0.5 - math.log(1.5)))
    assert terms.kl_reference == pytest.approx(0.5 - math.log(1.5))
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(0.1 * (1 - 1.5))


def test_truncated_importance_is_capped_and_scales_the_surrogate() -> None:
    weight = truncated_importance(tensor(-1.0, -1.0), tensor(-1.5, -3.0), 2.0)
    assert weight.tolist() == pytest.approx([math.exp(0.5), 2.0])
    terms = policy_loss(
        tensor(-1.0, -1.0), tensor(-1.0, -1.0), tensor(1.0, 1.0), tensor(0.5, 0.5), importance=weight, **BOUNDS
    )
    assert float(terms.loss.detach()) == pytest.approx(-0.5 * (math.exp(0.5) + 2.0))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
def test_absurd_ratios_never_give_nan(gap: float, advantage: float) -> None:
    new = torch.tensor([-1.0 + gap], requires_grad=True)
    terms = policy_loss(new, torch.tensor([-1.0]), torch.tensor([advantage]), torch.tensor([1.0]), **BOUNDS)
    terms.loss.backward()
    assert new.grad is not None
    assert math.isfinite(float(terms.loss.detach()))
    assert math.isfinite(float(new.grad))
    assert math.isfinite(terms.kl_old)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 10, 1 / 10, 0.0]),
        ("sequence_mean", [1 / (2 * 4), 1 / (2 * 6), 0.0]),
        ("constant", [1 / (3 * 20), 1 / (3 * 20), 0.0]),
    ],
)
def test_token_weights_equal_values_by_hand(aggregation: Any, expected: list[float]) -> None:
    assert token_weights([4, 6, 0], aggregation=aggregation, max_new_tokens=20) == pytest.approx(expected)


@given(st.lists(st.integers(0, 50), max_size=20))
def test_mean_weights_sum_to_one_over_the_batch(counts: list[int]) -> None:
    for aggregation in ("token_mean", "sequence_mean"):
        weights = token_weights(counts, aggregation=aggregation)
        total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
        assert total == pytest.approx(1.0 if any(counts) else 0.0)
