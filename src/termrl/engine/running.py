"""A batch that requests join and leave between decode steps: :class:`RunningBatch`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from termrl.capture.upstreams import FinishReason, GenerateRequest
from termrl.engine.cache import KVCache
from termrl.engine.decoder import Decoder
from termrl.engine.planning import SHARD_ROWS, Row
from termrl.engine.runner import Cancelled, EngineStats, Runner
from termrl.engine.sharing import find_shared_with


@dataclass
class _Shard:
    """The rows that one thread decodes."""

    runner: Runner
    live: list[Row] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    joining: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.live) + len(self.joining)


@dataclass(frozen=True)
class Ended:
    """A turn that ended.

    Attributes:
        request: as it was given.
        token_ids, logprobs, reason: as in :class:`termrl.capture.upstreams.GenerateResult`.
        service_s: its share of the steps it took part in.
    """

    request: GenerateRequest
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason
    service_s: float


class RunningBatch:
    """Decodes whatever has joined, one token a :meth:`step`. Made by ``EmbeddedEngine.running_batch``; one caller.

    Attributes:
        cancelled: asked for every row before each token; true ends it with ``abort``.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        make_row: Callable[[GenerateRequest, int], Row],
        stats: EngineStats,
        *,
        threads: int,
        max_tokens: int,
        cancelled: Cancelled | None,
    ) -> None:
        self._cache = cache
        self._make_row = make_row
        self._stats = stats
        self._threads = threads
        self._max_tokens = max_tokens // threads
        self.cancelled = cancelled
        self._shards = [_Shard(Runner(decoder)) for _ in range(threads)]
        self._prefixes = Runner(decoder)  # with a workspace of its own: the shards' hold live rows
        self._earlier: tuple[int, ...] = ()
        self._waiting: deque[Row] = deque()
        self._service: dict[int, float] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="termrl-engine-shard")

    @property
    def rows(self) -> int:
        """Turns that have joined and not ended."""
        return len(self._waiting) + sum(shard.rows for shard in self._shards)

    def join(self, requests: Sequence[GenerateRequest]) -> None:
        """Take part from the next step on (later only if their tokens do not fit in memory beside the others)."""
        for request in requests:
            row = self._make_row(request, 0)
            self._waiting.append(row)
            self._service[id(row)] = 0.0

    def step(self) -> list[Ended]:
        """Admit what waits, decode one token of every row, and return the turns that ended."""
        begun = time.monotonic()
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            ended = self._admit()
            taking_part = [row for shard in self._shards for row in [*shard.live, *shard.joining]]
            busy = [shard for shard in self._shards if shard.rows]
            if len(busy) == 1:
                self._run(busy[0], self._threads)
            else:
                for done in [self._pool.submit(self._run, shard, 1) for shard in busy]:
                    done.result()
        finally:
            torch.set_num_threads(before)
        for row in taking_part:
            self._service[id(row)] += (time.monotonic() - begun) / len(taking_part)
            if row.reason is not None:
                if row.kept is not None and row.reason != "abort":
                    self._cache.add_session(row.request.session_id, row.kept)
                ended.append(row)
        for shard in busy:
            self._stats.add(shard.runner.stats)
            shard.runner.stats = EngineStats()
        return [self._end(row) for row in ended]

    def close(self) -> None:
        """End the threads. Rows that are still live are lost."""
        self._pool.shutdown()

    def _admit(self) -> list[Row]:
        """Hand waiting rows to shards; returns those that end before they begin."""
        ended: list[Row] = []
        admitted: list[Row] = []
        while self._waiting:
            row = self._waiting[0]
            if row.reason is None and self.cancelled is not None and self.cancelled(row.request):
                row.reason = "abort"
            if row.reason is not None:
                ended.append(self._waiting.popleft())
                continue
            shard = self._place()
            sizes = [r.own + r.budget for r in [*shard.live, *shard.joining]]
            if sizes and (len(sizes) + 1) * max(*sizes, len(row.request.prompt_ids) + row.budget) > self._max_tokens:
                break
            shard.joining.append(self._waiting.popleft())
            admitted.append(row)
        if admitted:
            find_shared_with(admitted, self._earlier, self._cache, self._prefixes)
            self._earlier = admitted[-1].request.prompt_ids
            self._stats.batches += 1
        return ended

    def _place(self) -> _Shard:
        """The shard with the fewest rows, counting only those that are worth a thread."""
        worth = min(len(self._shards), 1 + sum(shard.rows for shard in self._shards) // SHARD_ROWS)
        return min(self._shards[:worth], key=lambda shard: shard.rows)

    def _run(self, shard: _Shard, intra: int) -> None:
        torch.set_num_threads(intra)  # OpenMP keeps it for each thread
        if shard.joining:
            shard.logits, shard.live = shard.runner.join(shard.logits, shard.live, shard.joining)
            shard.joining = []
        shard.logits, shard.live = shard.runner.step(shard.logits, shard.live, self.cancelled)

    def _end(self, row: Row) -> Ended:
        assert row.reason is not None
        service = self._service.pop(id(row))
        return Ended(row.request, tuple(row.token_ids), tuple(row.logprobs), row.reason, service)
