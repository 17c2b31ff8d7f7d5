from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrl.training.advantages import dead_group, group_advantages

Rewards = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12)


def test_advantages_are_reward_minus_mean_of_those_with_a_verdict() -> None:
    assert group_advantages([1.0, 0.0, None, 0.0, 1.0]) == [0.5, -0.5, None, -0.5, 0.5]


def test_group_scale_divides_by_the_standard_deviation() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale="group") == pytest.approx(
        [0.75 / 0.4330137, *[-0.25 / 0.4330137] * 3], rel=1e-6
    )


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([], "none_valid"),
        ([None, None], "none_valid"),
        ([None, 1.0], "one_valid"),
        ([0.0, 0.0, None], "zero_variance"),
        ([1.0, 1.0], "zero_variance"),
        ([1.0, 0.0], None),
        ([0.3, 0.3, 0.30001], None),
    ],
)
def test_groups_that_teach_nothing_are_named(rewards: list[float | None], reason: str | None) -> None:
    assert dead_group(rewards) == reason
    if reason is not None:
        for scale in ("none", "group"):
            advantages = group_advantages(rewards, scale=scale)
            assert advantages == [None if reward is None else 0.0 for reward in rewards]


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")])


@given(Rewards)
def test_advantages_sum_to_zero(rewards: list[float | None]) -> None:
    advantages = [value for value in group_advantages(rewards) if value is not None]
    assert sum(advantages) == pytest.approx(0, abs=1e-12)


@given(Rewards, st.randoms())
def test_order_and_episodes_without_a_verdict_change_nothing(rewards: list[float | None], random: Random) -> None:
    expected = sorted(value for value in group_advantages(rewards) if value is not None)
    shuffled = [*rewards, None]
    random.shuffle(shuffled)
    assert sorted(value for value in group_advantages(shuffled) if value is not None) == expected
