"""Sampling: the distribution, its logprobs and its seeds."""

from __future__ import annotations

import math

import pytest
import torch

from termrl.capture.upstreams import SamplingParams
from termrl.engine.sampling import sample, uniform


@pytest.mark.parametrize("vocab", [7, 512])
def test_frequencies_follow_the_tempered_softmax(vocab: int) -> None:
    torch.manual_seed(0)
    row = torch.randn(vocab) * 2
    n = 20_000
    tokens, logprobs = sample(
        row.repeat(n, 1), [SamplingParams(temperature=0.7)] * n, [uniform(1, i) for i in range(n)]
    )
    wanted = (row.double() / 0.7).softmax(-1)
    seen = torch.bincount(torch.tensor(tokens), minlength=vocab) / n
    assert float((seen - wanted).abs().sum()) < 0.02 * math.sqrt(vocab)
    assert logprobs == pytest.approx(wanted.log()[tokens].tolist(), abs=1e-5)


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_give_tokens_that_have_probability(number: float) -> None:
    logits = torch.full((1, 512), -torch.inf)
    logits[0, 3] = logits[0, 300] = 0.0
    tokens, logprobs = sample(logits, [SamplingParams()], [number])
    assert tokens == [3 if number == 0.0 else 300]
    assert logprobs == pytest.approx([math.log(0.5)])


def test_top_k_one_is_certain_and_top_p_keeps_the_token_that_crosses_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert sample(logits.clone(), [SamplingParams(top_k=1)], [0.99]) == ([0], [0.0])
    tokens, logprobs = sample(logits.clone(), [SamplingParams(top_p=0.6)], [0.99])
    assert (tokens, logprobs) == ([1], pytest.approx([math.log(0.3 / 0.8)]))


def test_numbers_depend_on_seed_and_index_and_fill_the_unit_interval() -> None:
    numbers = [uniform(seed, i) for seed in (0, 1, -5, 2**80) for i in range(500)]
    assert len(set(numbers)) == len(numbers)
    assert 0.0 <= min(numbers) < 0.01 and 0.99 < max(numbers) < 1.0
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.03)
    assert uniform(7, 3) == uniform(7, 3)
