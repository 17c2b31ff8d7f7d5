"""The estimators against counting, and against published values."""

from __future__ import annotations

from itertools import combinations

import pytest

from termrl.evaluation.pass_at_k import estimates, pass_at_k, wilson


def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts_with_a_pass_among_them() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            attempts = [place < c for place in range(n)]
            for k in range(1, n + 1):
                chosen = [any(some) for some in combinations(attempts, k)]
                assert pass_at_k(n, c, k) == pytest.approx(sum(chosen) / len(chosen))


def test_pass_at_k_of_more_attempts_than_there_were_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_is_wilsons(passed: int, n: int, low: float, high: float) -> None:
    """Values of Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (81 of 263), and its closed form."""
    assert wilson(passed / n, n) == pytest.approx((low, high), abs=1e-4)


def test_k_goes_up_to_the_attempts_of_the_least_attempted_task() -> None:
    found = estimates([(4, 2), (2, 0), (3, 3)])
    assert list(found) == [1, 2]
    assert found[1].value == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert found[2].value == pytest.approx((1 - 1 / 6 + 0.0 + 1.0) / 3)
    assert found[2].low < found[2].value < found[2].high


def test_a_task_without_a_verdict_is_in_no_rate_and_does_not_limit_k() -> None:
    assert estimates([(2, 1), (0, 0)]) == estimates([(2, 1)])
    assert estimates([(0, 0)]) == {}


def test_the_interval_shrinks_with_tasks_not_with_attempts_at_one_task() -> None:
    few, many, deep = estimates([(1, 1), (1, 0)]), estimates([(1, 1), (1, 0)] * 8), estimates([(8, 8), (8, 0)])
    assert many[1].high - many[1].low < few[1].high - few[1].low
    assert (deep[1].low, deep[1].high) == (few[1].low, few[1].high)
