"""What a batch's prompts need not compute: their sessions' cached tokens, or a prefix that several begin with."""

from __future__ import annotations

from collections.abc import Sequence

from termrl.engine.cache import KVCache
from termrl.engine.decoder import Prefix
from termrl.engine.planning import Row, common_length
from termrl.engine.runner import Runner

_MIN_SHARED = 16  # tokens; a shorter common prefix is not worth a second attention part


def find_shared(rows: Sequence[Row], cache: KVCache, runner: Runner) -> None:
    """Give each row its session's cache, or else the prefix that all rows without one have in common.

    Args:
        rows: the rows of one batch.
        cache: what is known from earlier turns; takes up a new prefix.
        runner: computes a new prefix; what its workspace held is lost.
    """
    fresh = find_sessions(rows, cache)
    if len(fresh) == 1:
        fresh[0].prefix = cache.longest_prefix(fresh[0].request.prompt_ids)
    elif fresh:
        prefix = _common_prefix([row.request.prompt_ids for row in fresh], cache, runner)
        for row in fresh:
            row.prefix = prefix


def find_shared_with(rows: Sequence[Row], earlier: Sequence[int], cache: KVCache, runner: Runner) -> None:
    """As :func:`find_shared` for rows that come one after the other; ``earlier`` is a prompt that came before.

    The second prompt of a kind makes the prefix, the later ones take it from the cache.
    """
    for row in find_sessions(rows, cache):
        ids = row.request.prompt_ids
        row.prefix = cache.longest_prefix(ids)
        if row.prefix is None and earlier:
            row.prefix = _common_prefix([ids, tuple(earlier)], cache, runner)
        earlier = ids


def find_sessions(rows: Sequence[Row], cache: KVCache) -> list[Row]:
    """Give each row what is cached of its session; returns the rows that have nothing there."""
    fresh: list[Row] = []
    for row in rows:
        ids = row.request.prompt_ids
        session = cache.session(row.request.session_id)
        common = min(common_length(session.token_ids, ids), len(ids) - 1) if session is not None else 0
        prefix = session.prefix if session is not None else None
        if session is None or common == 0 or (prefix is not None and common < len(prefix)):
            fresh.append(row)
        else:
            row.session, row.prefix, row.cached = session, prefix, common - (len(prefix) if prefix else 0)
    return fresh


def _common_prefix(prompts: Sequence[tuple[int, ...]], cache: KVCache, runner: Runner) -> Prefix | None:
    shortest = min(prompts, key=len)[:-1]
    shared = shortest[: min(common_length(shortest, prompt) for prompt in prompts)]
    if len(shared) < _MIN_SHARED:
        return None
    prefix = cache.prefix(shared)
    if prefix is None:
        prefix = runner.prefix(shared)
        cache.add_prefix(prefix)
    return prefix
