"""The embedded engine: batched generation with exact logprobs over a transformers model folder, in process.

One :meth:`EmbeddedEngine.generate` call is one batch. Its prompts' common prefix is computed once, equal prompts are
computed once, a session's earlier turns are taken from its cached keys and values, and all that is new is computed in
ragged passes. Rows that end leave the batch. Calls must not overlap.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from termrl.capture.upstreams import FinishReason, GenerateRequest, GenerateResult
from termrl.engine.cache import KVCache
from termrl.engine.decoder import Decoder
from termrl.engine.folder import check_folder
from termrl.engine.planning import Row, cut_shards
from termrl.engine.runner import Cancelled, EngineStats, Runner
from termrl.engine.running import RunningBatch
from termrl.engine.sharing import find_shared
from termrl.engine.weights import DecoderConfig, Weights
from termrl.errors import PolicyError

__all__ = ["EmbeddedEngine", "EngineStats"]

_MEMORY_SHARE = 0.15  # of the machine's memory, for cached tokens by default; a batch's own may take as much again


class EmbeddedEngine:
    """Generates for many sessions at once from one model folder on the CPU, in fp32.

    Args:
        model_dir: config.json, safetensors, tokenizer with chat template; model types llama, qwen2, qwen3.
        threads: cores to use; ``None`` takes all that this process may run on. Torch's own setting stays as it is.
        max_kv_tokens: bound on the tokens whose keys and values are cached between calls, and, apart, on those of
            one batch (a larger batch is cut into several); ``None`` takes a share of the machine's memory.

    Raises:
        ModelError: the folder is not whole or its model is not supported.
    """

    def __init__(self, model_dir: Path, *, threads: int | None = None, max_kv_tokens: int | None = None) -> None:
        self.model_dir = check_folder(Path(model_dir))
        self.model_name = self.model_dir.name
        self.threads = threads if threads is not None else len(os.sched_getaffinity(0))
        self.config = DecoderConfig.read(self.model_dir)
        with torch.inference_mode(), _intra_op(1):
            self._weights = Weights.load(self.model_dir, self.config)
            self._decoder = Decoder(self._weights)
        self.max_kv_tokens = max_kv_tokens if max_kv_tokens is not None else _default_kv_tokens(self.config)
        self._cache = KVCache(self.max_kv_tokens)
        self._runners = [Runner(self._decoder)]
        self.policy_version = 0
        self.stats = EngineStats()

    @property
    def context_window(self) -> int:
        """Tokens that prompt and completion may have together."""
        return self.config.context

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The model's own end-of-turn tokens; a request has to name them in its sampling to stop there."""
        return self.config.eos_ids

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are held between calls."""
        return self._cache.tokens

    def set_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace weights by transformers' parameter names (those not given stay) and forget all that was cached.

        Raises:
            ModelError: an unknown name or a wrong shape.
        """
        self._cache.clear()
        with torch.inference_mode(), _intra_op(1):
            self._weights.update(tensors)
        self.policy_version = version

    def release(self, session_id: str) -> None:
        """Forget what is cached for a session; with the last one, give the batches' memory back. Idempotent."""
        self._cache.release(session_id)
        if not self._cache.sessions:
            for runner in self._runners:
                runner.free()

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        cancelled: Cancelled | None = None,
    ) -> list[GenerateResult]:
        """Generate one turn for each request, as one batch ordered by ``order``.

        Args:
            requests: prompts with their sampling; a request without a seed gets a random one.
            cancelled: asked for every live request before each token; true ends it with ``abort``.

        Returns:
            One result a request, in the order given.

        Raises:
            PolicyError: a request that :meth:`check` refuses; nothing was generated then.
        """
        rows: list[Row] = []
        for index in sorted(range(len(requests)), key=lambda i: requests[i].order):
            rows.append(self._row(requests[index], index))
        live = [row for row in rows if row.reason is None]
        with _intra_op(1):
            find_shared(live, self._cache, self._runners[0])
            self._run(live, cancelled)
        for row in live:  # in row order, whatever thread ended first
            if row.kept is not None:
                self._cache.add_session(row.request.session_id, row.kept)
        rows.sort(key=lambda row: row.index)
        return [GenerateResult(tuple(r.token_ids), tuple(r.logprobs), _reason(r), self.policy_version) for r in rows]

    def _run(self, rows: list[Row], cancelled: Cancelled | None) -> None:
        """Run the rows in shards, each in a thread of its own.

        Two threads that each run half the rows need no barrier at every matrix product, so they are as fast as two
        intra-op threads on idle cores and many times as fast on busy ones.
        """
        if not rows:
            return
        shards = cut_shards(rows, self.threads)
        while len(self._runners) < len(shards):
            self._runners.append(Runner(self._decoder))
        intra, bound = self.threads // len(shards), self.max_kv_tokens // len(shards)

        def work(runner: Runner, shard: list[Row]) -> None:
            torch.set_num_threads(intra)  # OpenMP keeps it for each thread
            runner.run(shard, bound, cancelled)

        if len(shards) == 1:
            work(self._runners[0], rows)
        else:
            with ThreadPoolExecutor(len(shards), thread_name_prefix="termrl-engine") as pool:
                for done in [pool.submit(work, *pair) for pair in zip(self._runners, shards, strict=False)]:
                    done.result()
        for runner in self._runners:
            self.stats.add(runner.stats)
            runner.stats = EngineStats()

    def running_batch(self, cancelled: Cancelled | None = None) -> RunningBatch:
        """An empty batch that requests may join at any time; while it has rows, nothing else may use the engine."""
        return RunningBatch(
            self._decoder,
            self._cache,
            self._row,
            self.stats,
            threads=self.threads,
            max_tokens=self.max_kv_tokens,
            cancelled=cancelled,
        )

    def check(self, request: GenerateRequest) -> None:
        """Check one request.

        Raises:
            PolicyError: the prompt is empty or holds an id outside the vocabulary, or a sampling value is out of range.
        """
        ids, s = request.prompt_ids, request.sampling
        who = f"session {request.session_id}"
        if not ids or min(ids) < 0 or max(ids) >= self.config.vocab:
            raise PolicyError(f"{who}: the prompt is empty or holds ids outside the vocabulary")
        if not (0 <= s.temperature < float("inf") and 0 < s.top_p <= 1 and s.top_k >= 0 and s.max_tokens >= 0):
            raise PolicyError(f"{who}: temperature, top_p, top_k or max_tokens out of range: {s}")

    def _row(self, request: GenerateRequest, index: int) -> Row:
        self.check(request)
        ids, sampling = request.prompt_ids, request.sampling
        room = max(0, self.context_window - len(ids))
        row = Row(
            request=request,
            index=index,
            budget=min(sampling.max_tokens, room),
            clamped=room < sampling.max_tokens,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(63),
        )
        if sampling.stop_at_fence:
            from termrl.engine.fence import FenceWatch

            row.watch = FenceWatch.of(self.model_dir)
        if row.budget == 0:
            row.reason = "context" if row.clamped else "length"
        return row


@contextmanager
def _intra_op(threads: int) -> Iterator[None]:
    """Torch's intra-op threads within, as they were after."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reason(row: Row) -> FinishReason:
    assert row.reason is not None
    return row.reason


def _default_kv_tokens(config: DecoderConfig) -> int:
    import psutil

    a_token = 2 * 4 * config.layers * config.kv_heads * config.head_dim
    return max(config.context, int(psutil.virtual_memory().total * _MEMORY_SHARE) // a_token)
