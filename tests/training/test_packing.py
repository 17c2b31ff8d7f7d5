from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from termrl.training.packing import Plan, TokenSequence, make_sequence, plan_batch

Rows = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=14)


def sequences_of(rows: list[list[tuple[int, bool]]], opening: list[int]) -> list[TokenSequence]:
    made = []
    for row in rows:
        ids = opening + [token for token, _ in row]
        mask = [0] * len(opening) + [int(sampled) for _, sampled in row]
        made.append(make_sequence(ids, mask, 1.0))
    return [sequence for sequence in made if sequence is not None]


def seen_by(plan: Plan, pack_index: int, node: int) -> list[int]:
    """The tokens that a node attends to, its own last, by the plan's tiles."""
    pack = plan.packs[pack_index]
    tile = next(tile for tile in pack.tiles if tile.start <= node < tile.stop)
    keys = np.concatenate((tile.ancestors, np.arange(tile.start, tile.stop)))
    visible = keys[~tile.hidden[node - tile.start]]
    return plan.prefix_ids.tolist() + pack.token_ids[visible].tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(Rows, max_size=12),
    st.lists(st.integers(0, 2), max_size=6),
    st.integers(1, 20),
    st.integers(1, 5),
)
def test_every_prediction_sees_exactly_its_own_sequence(
    rows: list[list[tuple[int, bool]]], opening: list[int], max_tokens: int, tile: int
) -> None:
    sequences = sequences_of(rows, opening)
    plan = plan_batch(sequences, max_tokens=max_tokens, tile=tile)
    found: list[int] = []
    for number, pack in enumerate(plan.packs):
        for member, targets in zip(pack.members, pack.member_targets, strict=True):
            found.append(member)
            sequence = sequences[member]
            for target, position in zip(targets.tolist(), sequence.targets.tolist(), strict=True):
                node = int(pack.rows[pack.target_row[target]])
                assert pack.target_token[target] == sequence.token_ids[position]
                assert pack.positions[node] == position - 1
                assert seen_by(plan, number, node) == sequence.token_ids[:position].tolist()
    assert sorted(found) == list(range(len(sequences)))


@settings(max_examples=60, deadline=None)
@given(st.lists(Rows, min_size=2, max_size=12), st.lists(st.integers(0, 2), max_size=6))
def test_each_distinct_prefix_is_computed_once(rows: list[list[tuple[int, bool]]], opening: list[int]) -> None:
    sequences = sequences_of(rows, opening)
    plan = plan_batch(sequences, max_tokens=10_000)
    distinct = {tuple(s.token_ids[:n].tolist()) for s in sequences for n in range(1, s.inputs + 1)}
    assert plan.computed_tokens == len(distinct)


@settings(max_examples=40, deadline=None)
@given(st.lists(Rows, max_size=12), st.lists(st.integers(0, 2), max_size=6), st.integers(1, 20))
def test_packs_keep_to_the_budget_unless_one_sequence_is_longer(
    rows: list[list[tuple[int, bool]]], opening: list[int], max_tokens: int
) -> None:
    plan = plan_batch(sequences_of(rows, opening), max_tokens=max_tokens)
    for pack in plan.packs:
        assert len(pack.token_ids) <= max_tokens or len(pack.members) == 1


def test_the_common_prefix_stops_before_the_first_prediction() -> None:
    sequences = sequences_of([[(1, True), (2, True)], [(1, True), (0, True)]], [5, 6, 7])
    assert plan_batch(sequences, max_tokens=100).prefix_ids.tolist() == [5, 6]


@pytest.mark.parametrize(("ids", "mask"), [((), ()), ((3,), (1,)), ((3,), (0,)), ((3, 4, 5), (0, 0, 0))])
def test_segments_without_a_trainable_token_cost_nothing(ids: tuple[int, ...], mask: tuple[int, ...]) -> None:
    assert make_sequence(ids, mask, 1.0) is None


def test_tokens_after_the_last_sampled_one_are_not_computed() -> None:
    sequence = make_sequence((1, 2, 3, 4, 5, 6), (0, 0, 1, 0, 0, 0), 1.0)
    assert sequence is not None
    assert sequence.inputs == 2


def test_equal_tokens_at_two_temperatures_are_two_predictions() -> None:
    sequences = [s for t in (0.5, 1.0) if (s := make_sequence((1, 2, 3), (0, 0, 1), t)) is not None]
    (pack,) = plan_batch(sequences, max_tokens=100).packs
    assert pack.row_temperature.tolist() == [0.5, 1.0]
    assert len(pack.token_ids) + plan_batch(sequences, max_tokens=100).prefix_ids.size == 2
