"""Which rows make a batch, what they share, and in which passes their prompts are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from termrl.capture.upstreams import FinishReason, GenerateRequest
from termrl.engine.cache import CachedSession
from termrl.engine.decoder import Prefix

if TYPE_CHECKING:
    from termrl.engine.fence import FenceWatch

PASS_TOKENS = 1024  # new tokens of one prefill pass
PASS_SCORES = 1 << 24  # attention scores of one prefill pass and layer
SHARD_ROWS = 4  # rows that a thread of its own pays for


@dataclass(eq=False)
class Row:
    """One request in the batch. Own tokens are those after the prefix.

    Attributes:
        index: its place in the caller's list.
        budget: at most this many new tokens.
        clamped: the context window, not ``max_tokens``, sets the budget.
        session: what is cached of the session, if that is of use; ``cached`` own tokens are taken from it.
        twin: an earlier row of the batch with the same prompt, whose keys and values are copied.
        place: the workspace row.
        reason: why the turn ended, once it has.
        kept: what to cache of the session, once the turn has ended.
    """

    request: GenerateRequest
    index: int
    budget: int
    clamped: bool
    seed: int
    prefix: Prefix | None = None
    session: CachedSession | None = None
    cached: int = 0
    twin: Row | None = None
    place: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    watch: FenceWatch | None = None
    reason: FinishReason | None = None
    kept: CachedSession | None = None

    @property
    def before(self) -> int:
        """Tokens of the prefix."""
        return len(self.prefix) if self.prefix is not None else 0

    @property
    def own(self) -> int:
        """Own tokens of the prompt."""
        return len(self.request.prompt_ids) - self.before


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def cut_batches(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Cut the rows, in order, so that no batch's own tokens can exceed the bound (one row always may)."""
    batches: list[list[Row]] = []
    longest = 0
    for row in rows:
        size = row.own + row.budget
        longest = max(longest, size)
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
            longest = size
        batches[-1].append(row)
    return batches


def find_twins(rows: list[Row]) -> None:
    """Rows with one prompt are computed once: the later ones point at the first."""
    first: dict[tuple[int, ...], Row] = {}
    for row in rows:
        twin = first.setdefault(row.request.prompt_ids, row)
        if twin is not row and twin.prefix is row.prefix:
            row.twin = twin


def cut_passes(rows: list[Row], heads: int) -> list[list[Row]]:
    """Cut the rows, in place order, into prefill passes of bounded work and memory (one row always may exceed)."""
    passes: list[list[Row]] = []
    tokens = widest = longest = 0
    for row in rows:
        new, own = row.own - row.cached, row.own + row.before
        widest, longest = max(widest, new), max(longest, own)
        scores = (len(passes[-1]) + 1) * heads * widest * longest if passes else 0
        if not passes or tokens + new > PASS_TOKENS or scores > PASS_SCORES:
            passes.append([])
            tokens, widest, longest = 0, new, own
        passes[-1].append(row)
        tokens += new
    return passes


def prefixes_of(rows: list[Row]) -> list[tuple[Prefix, Tensor | None]]:
    """The distinct prefixes of these rows, each with the rows that have it (``None``: all of them)."""
    members: dict[int, list[int]] = {}
    known: dict[int, Prefix] = {}
    for i, row in enumerate(rows):
        if row.prefix is not None:
            known[id(row.prefix)] = row.prefix
            members.setdefault(id(row.prefix), []).append(i)
    return [(known[key], None if len(which) == len(rows) else torch.tensor(which)) for key, which in members.items()]


def cut_shards(rows: list[Row], threads: int) -> list[list[Row]]:
    """Cut the rows, in order, into at most ``threads`` parts of like size, each worth a thread of its own."""
    count = max(1, min(threads, len(rows) // SHARD_ROWS))
    edges = [len(rows) * i // count for i in range(count + 1)]
    return [rows[lo:hi] for lo, hi in pairwise(edges)]
