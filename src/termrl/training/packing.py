"""The prefix tree of a batch: each distinct prefix of its sequences is one node, computed once.

Sorting the sequences puts the tree's nodes into depth-first order, in which the nodes below a node are a contiguous
range. Two facts make attention over it cheap:

- a node attends to another exactly if it lies in that one's range;
- the nodes before a tile of consecutive nodes that any of the tile attends to are ancestors of the tile's first node.

So a tile needs the keys of one path and its own, and no mask over the whole tree ever exists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Packs may be this much larger than an even share, so that ragged sequences rarely spill into one pack more.
_SLACK = 1.1


@dataclass(frozen=True)
class TokenSequence:
    """One token sequence to compute: a segment's tokens, cut after the last one that is trained.

    Attributes:
        token_ids: the segment's tokens up to and with the last trained one.
        targets: positions (> 0, ascending) of the tokens whose logprob is wanted.
        temperature: logits are divided by it.
    """

    token_ids: IntArray
    targets: IntArray
    temperature: float

    @property
    def inputs(self) -> int:
        """How many tokens go through the model: the last trained one only needs those before it."""
        return int(self.targets[-1])


@dataclass(frozen=True)
class Tile:
    """Consecutive nodes [start, stop) that are attended together.

    Attributes:
        start, stop: node range of the queries, which are also keys.
        ancestors: nodes before ``start`` on the path to it.
        hidden: True where a query (row) must not see a key (column: ancestors, then the tile's nodes).
    """

    start: int
    stop: int
    ancestors: IntArray
    hidden: BoolArray


@dataclass(frozen=True)
class Pack:
    """A part of the batch as one tree below the batch's common prefix.

    Attributes:
        token_ids: [nodes] token of each node, depth-first.
        positions: [nodes] position of each node in its sequence.
        prefix: number of common-prefix tokens that come before every node.
        tiles: the nodes, cut into tiles.
        rows: [rows] node whose output predicts; [rows] ``row_temperature`` divides its logits.
        target_row, target_token: [targets] for each distinct prediction, its row and the predicted token.
        members: which sequences of the batch are in it.
        member_targets: for each member, the indices into ``target_row`` of its targets, in order.
    """

    token_ids: IntArray
    positions: IntArray
    prefix: int
    tiles: tuple[Tile, ...]
    rows: IntArray
    row_temperature: npt.NDArray[np.float64]
    target_row: IntArray
    target_token: IntArray
    members: tuple[int, ...]
    member_targets: tuple[IntArray, ...]


@dataclass(frozen=True)
class Plan:
    """A whole batch: the tokens that all sequences begin with, and the parts that follow them."""

    prefix_ids: IntArray
    prefix_tiles: tuple[Tile, ...]
    packs: tuple[Pack, ...]

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model in one pass."""
        return len(self.prefix_ids) + sum(len(pack.token_ids) for pack in self.packs)


def make_sequence(token_ids: Sequence[int], loss_mask: Sequence[int], temperature: float) -> TokenSequence | None:
    """The sequence to compute for a segment, or ``None`` if nothing in it can be trained.

    A token at position 0 has nothing that predicts it and is never a target.
    """
    targets = np.flatnonzero(np.asarray(loss_mask[1:], dtype=np.int64)).astype(np.int64) + 1
    if not len(targets):
        return None
    return TokenSequence(np.asarray(token_ids[: int(targets[-1]) + 1], dtype=np.int64), targets, temperature)


def plan_batch(sequences: Sequence[TokenSequence], *, max_tokens: int, parts: int = 1, tile: int = 128) -> Plan:
    """Cut a batch into packs of at most ``max_tokens`` nodes (a longer single sequence is a pack of its own).

    Args:
        sequences: in any order; an order that is a function of their content makes the plan one too.
        max_tokens: nodes of a pack, the common prefix not counted.
        parts: packs that are computed at a time; their number is made a multiple of it where that is possible.
        tile: queries that are attended together.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].token_ids.tolist())
    ordered = [sequences[index] for index in order]
    prefix = _common_prefix(ordered)
    shared = [prefix] + [
        _shared(before.token_ids[: before.inputs], sequence.token_ids[: sequence.inputs])
        for before, sequence in itertools.pairwise(ordered)
    ]
    fresh = [sequence.inputs - common for sequence, common in zip(ordered, shared, strict=False)]
    if parts > 1:
        rounds = math.ceil(sum(fresh) / (max_tokens * parts))
        even = sum(fresh) / (parts * max(1, rounds))
        max_tokens = min(max_tokens, math.ceil(_SLACK * even))
    packs: list[Pack] = []
    chosen: list[int] = []
    nodes = 0
    for index, new in zip(order, fresh, strict=True):
        if chosen and nodes + new > max_tokens:
            packs.append(_build_pack(sequences, chosen, prefix, tile))
            chosen, nodes = [], 0
        nodes += new if chosen else sequences[index].inputs - prefix
        chosen.append(index)
    if chosen:
        packs.append(_build_pack(sequences, chosen, prefix, tile))
    prefix_ids = sequences[order[0]].token_ids[:prefix] if order else np.zeros(0, np.int64)
    prefix_tiles = _tiles(np.arange(-1, prefix - 1), np.full(prefix, prefix), tile)
    return Plan(prefix_ids, prefix_tiles, tuple(packs))


def _shared(left: IntArray, right: IntArray) -> int:
    """Length of the longest common prefix."""
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n


def _common_prefix(ordered: Sequence[TokenSequence]) -> int:
    """Tokens that all sequences begin with and that predict no target; 0 for fewer than two sequences."""
    if len(ordered) < 2:
        return 0
    # In lexicographic order the first and the last sequence differ earliest.
    shared = _shared(ordered[0].token_ids, ordered[-1].token_ids)
    return max(0, min(shared, *(int(sequence.targets[0]) - 1 for sequence in ordered)))


def _build_pack(sequences: Sequence[TokenSequence], members: Sequence[int], prefix: int, tile: int) -> Pack:
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    parents: list[IntArray] = []
    stops: list[int] = []
    rows: dict[tuple[int, float], int] = {}
    targets: dict[tuple[int, int], int] = {}
    member_targets: list[IntArray] = []
    path = np.zeros(0, np.int64)
    before = np.zeros(0, np.int64)
    count = 0
    for member in members:
        sequence = sequences[member]
        inputs = sequence.token_ids[: sequence.inputs]
        shared = max(_shared(before, inputs), prefix) - prefix
        for node in path[shared:]:
            stops[node] = count
        fresh = np.arange(count, count + len(inputs) - prefix - shared)
        parent = int(path[shared - 1]) if shared else -1
        tokens.append(inputs[prefix + shared :])
        positions.append(np.arange(prefix + shared, len(inputs)))
        parents.append(np.concatenate(([parent], fresh[:-1])) if len(fresh) else fresh)
        stops.extend([-1] * len(fresh))
        count += len(fresh)
        path = np.concatenate((path[:shared], fresh))
        before = inputs
        own: list[int] = []
        for position in sequence.targets.tolist():
            row = rows.setdefault((int(path[position - 1 - prefix]), sequence.temperature), len(rows))
            own.append(targets.setdefault((row, int(sequence.token_ids[position])), len(targets)))
        member_targets.append(np.asarray(own, np.int64))
    for node in path:
        stops[node] = count
    return Pack(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions),
        prefix=prefix,
        tiles=_tiles(np.concatenate(parents), np.asarray(stops, np.int64), tile),
        rows=np.asarray([node for node, _ in rows], np.int64),
        row_temperature=np.asarray([temperature for _, temperature in rows], np.float64),
        target_row=np.asarray([row for row, _ in targets], np.int64),
        target_token=np.asarray([token for _, token in targets], np.int64),
        members=tuple(members),
        member_targets=tuple(member_targets),
    )


def _tiles(parents: IntArray, stops: IntArray, tile: int) -> tuple[Tile, ...]:
    """Cut nodes in depth-first order into tiles. ``stops[i]``: end of the range of nodes at and below node i."""
    tiles: list[Tile] = []
    for start in range(0, len(parents), tile):
        stop = min(start + tile, len(parents))
        ancestors: list[int] = []
        node = int(parents[start])
        while node >= 0:
            ancestors.append(node)
            node = int(parents[node])
        ancestors.reverse()
        keys = np.concatenate((np.asarray(ancestors, np.int64), np.arange(start, stop)))
        queries = np.arange(start, stop)[:, None]
        hidden = (queries < keys[None, :]) | (queries >= stops[keys][None, :])
        tiles.append(Tile(start, stop, np.asarray(ancestors, np.int64), hidden))
    return tuple(tiles)
