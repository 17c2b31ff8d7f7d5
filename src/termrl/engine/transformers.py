"""The embedded engine: batched generation with exact logprobs over a transformers model folder, in process.

One :meth:`EmbeddedEngine.generate` call is one batch. Its prompts' common prefix is computed once, equal prompts are
computed once, a session's earlier turns are taken from its cached keys and values, and all that is new is computed in
ragged passes. Rows that end leave the batch. Everything runs in the caller's thread; calls must not overlap.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from termrl.capture.upstreams import FinishReason, GenerateRequest, GenerateResult
from termrl.engine.cache import CachedSession, KVCache
from termrl.engine.decoder import Decoder, Prefix, Step, Workspace
from termrl.engine.folder import check_folder
from termrl.engine.planning import (
    PASS_SCORES,
    PASS_TOKENS,
    Row,
    common_length,
    cut_batches,
    cut_passes,
    find_twins,
    prefixes_of,
)
from termrl.engine.sampling import sample, uniform
from termrl.engine.weights import DecoderConfig, Weights
from termrl.errors import PolicyError

_MIN_SHARED = 16  # tokens; a shorter common prefix is not worth a second attention part
_MEMORY_SHARE = 0.15  # of the machine's memory, for cached tokens by default; a batch's own may take as much again


@dataclass
class EngineStats:
    """Running totals. ``reused_tokens`` are prompt tokens that were taken from a cache or shared in the batch."""

    batches: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def since(self, earlier: EngineStats) -> EngineStats:
        """The difference to an earlier copy."""
        return EngineStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


class EmbeddedEngine:
    """Generates for many sessions at once from one model folder on the CPU, in fp32.

    Args:
        model_dir: config.json, safetensors, tokenizer with chat template; model types llama, qwen2, qwen3.
        threads: intra-op threads; ``None`` leaves torch's setting.
        max_kv_tokens: bound on the tokens whose keys and values are cached between calls, and, apart, on those of
            one batch (a larger batch is cut into several); ``None`` takes a share of the machine's memory.

    Raises:
        ModelError: the folder is not whole or its model is not supported.
    """

    def __init__(self, model_dir: Path, *, threads: int | None = None, max_kv_tokens: int | None = None) -> None:
        self.model_dir = check_folder(Path(model_dir))
        self.model_name = self.model_dir.name
        if threads is not None:
            torch.set_num_threads(threads)
        self.config = DecoderConfig.read(self.model_dir)
        with torch.inference_mode():
            self._weights = Weights.load(self.model_dir, self.config)
            self._decoder = Decoder(self._weights)
        self.max_kv_tokens = max_kv_tokens if max_kv_tokens is not None else _default_kv_tokens(self.config)
        self._cache = KVCache(self.max_kv_tokens)
        self._space = Workspace(self.config)
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
        with torch.inference_mode():
            self._weights.update(tensors)
        self.policy_version = version

    def release(self, session_id: str) -> None:
        """Forget what is cached for a session. Idempotent."""
        self._cache.release(session_id)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        cancelled: Callable[[GenerateRequest], bool] | None = None,
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
        results: dict[int, GenerateResult] = {}
        rows: list[Row] = []
        for index in sorted(range(len(requests)), key=lambda i: requests[i].order):
            row = self._row(requests[index], index)
            if row.budget > 0:
                rows.append(row)
            else:
                results[index] = self._result(row, "context" if row.clamped else "length")
        begun = time.perf_counter()
        self._find_shared(rows)
        self.stats.prefill_s += time.perf_counter() - begun
        for batch in cut_batches(rows, self.max_kv_tokens):
            self._generate_batch(batch, results, cancelled)
        return [results[index] for index in range(len(requests))]

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
        return row

    def _generate_batch(
        self,
        rows: list[Row],
        results: dict[int, GenerateResult],
        cancelled: Callable[[GenerateRequest], bool] | None,
    ) -> None:
        begun = time.perf_counter()
        find_twins(rows)
        logits = self._prefill(rows)
        prefilled = time.perf_counter()
        live = sorted(rows, key=lambda row: row.place)
        while live:
            logits, live = self._advance(logits, live, results, cancelled)
        self.stats.batches += 1
        self.stats.prompt_tokens += sum(len(row.request.prompt_ids) for row in rows)
        self.stats.prefill_s += prefilled - begun
        self.stats.decode_s += time.perf_counter() - prefilled
        self.stats.decoded_tokens += sum(len(row.token_ids) for row in rows)

    # -- prompts ------------------------------------------------------------------------------------------------

    def _find_shared(self, rows: list[Row]) -> None:
        """Give each row its session's cache, or else the prefix that all rows without one have in common."""
        fresh: list[Row] = []
        for row in rows:
            ids = row.request.prompt_ids
            session = self._cache.session(row.request.session_id)
            common = min(common_length(session.token_ids, ids), len(ids) - 1) if session is not None else 0
            prefix = session.prefix if session is not None else None
            if session is None or common == 0 or (prefix is not None and common < len(prefix)):
                fresh.append(row)
            else:
                row.session, row.prefix, row.cached = session, prefix, common - (len(prefix) if prefix else 0)
        if len(fresh) == 1:
            fresh[0].prefix = self._cache.longest_prefix(fresh[0].request.prompt_ids)
        elif fresh:
            shortest = min((row.request.prompt_ids for row in fresh), key=len)[:-1]
            shared = shortest[: min(common_length(shortest, row.request.prompt_ids) for row in fresh)]
            if len(shared) >= _MIN_SHARED:
                prefix = self._cache.prefix(shared) or self._compute_prefix(shared)
                for row in fresh:
                    row.prefix = prefix

    def _compute_prefix(self, token_ids: tuple[int, ...]) -> Prefix:
        self._space.shape(1, len(token_ids))
        self._pass_in_pieces(0, 0, token_ids, None)
        prefix = Prefix(token_ids, self._space.k[:, 0].clone(), self._space.v[:, 0].clone())
        self._cache.add_prefix(prefix)
        return prefix

    def _prefill(self, rows: list[Row]) -> Tensor:
        """Compute the prompts; returns the logits after each, ``[rows, vocab]``, by the rows' places."""
        # rows of like length stand side by side, so that a pass pads little
        firsts = sorted((r for r in rows if r.twin is None), key=lambda r: (r.prefix is None, r.own - r.cached, r.own))
        placed = firsts + [r for r in rows if r.twin is not None]
        for place, row in enumerate(placed):
            row.place = place
        self._space.shape(len(rows), max(row.own + row.budget for row in rows))
        for row in firsts:
            if row.session is not None:
                self._space.k[:, row.place, :, : row.cached] = row.session.k[:, :, : row.cached]
                self._space.v[:, row.place, :, : row.cached] = row.session.v[:, :, : row.cached]
        hidden = torch.cat([self._prefill_pass(group) for group in cut_passes(firsts, self.config.heads)])
        logits = self._decoder.logits(hidden)
        source = [row.place if row.twin is None else row.twin.place for row in placed]
        for row in placed:
            if row.twin is not None:
                self._space.copy_row(row.twin.place, row.place, row.own)
        self.stats.reused_tokens += sum(len(r.request.prompt_ids) - (r.own - r.cached) for r in firsts)
        self.stats.reused_tokens += sum(len(r.request.prompt_ids) for r in rows if r.twin is not None)
        return logits if len(firsts) == len(rows) else logits[torch.tensor(source)]

    def _prefill_pass(self, rows: list[Row]) -> Tensor:
        new = [row.request.prompt_ids[row.before + row.cached :] for row in rows]
        if len(rows) == 1:
            return self._pass_in_pieces(rows[0].place, rows[0].cached, new[0], rows[0].prefix)
        step = Step(
            token_ids=torch.tensor([i for ids in new for i in ids]),
            lo=rows[0].place,
            hi=rows[-1].place + 1,
            starts=torch.tensor([row.cached for row in rows]),
            counts=torch.tensor([len(ids) for ids in new]),
            prefixes=prefixes_of(rows),
        )
        self.stats.prefill_tokens += len(step.token_ids)
        return self._decoder.forward(step, self._space)

    def _pass_in_pieces(self, place: int, start: int, token_ids: Sequence[int], prefix: Prefix | None) -> Tensor:
        """Run one row's new tokens, however many, in pieces whose attention scores stay bounded."""
        reach = start + len(token_ids) + (len(prefix) if prefix else 0)
        size = max(16, min(PASS_TOKENS, PASS_SCORES // (self.config.heads * reach)))
        edges = [*range(0, len(token_ids), size), len(token_ids)]
        hidden = torch.empty(0)
        for lo, hi in pairwise(edges):
            step = Step(
                token_ids=torch.tensor(token_ids[lo:hi]),
                lo=place,
                hi=place + 1,
                starts=torch.tensor([start + lo]),
                counts=torch.tensor([hi - lo]),
                prefixes=[(prefix, None)] if prefix is not None else [],
            )
            hidden = self._decoder.forward(step, self._space)
        self.stats.prefill_tokens += len(token_ids)
        return hidden

    # -- completions --------------------------------------------------------------------------------------------

    def _advance(
        self,
        logits: Tensor,
        live: list[Row],
        results: dict[int, GenerateResult],
        cancelled: Callable[[GenerateRequest], bool] | None,
    ) -> tuple[Tensor, list[Row]]:
        """Sample one token a live row, retire the rows that end, and run the rest one token on."""
        numbers = [uniform(row.seed, len(row.token_ids)) for row in live]
        tokens, logprobs = sample(logits, [row.request.sampling for row in live], numbers)
        ended: list[Row] = []
        for row, token, logprob in zip(live, tokens, logprobs, strict=True):
            reason = self._take(row, token, logprob, cancelled)
            if reason is not None:
                results[row.index] = self._result(row, reason)
                ended.append(row)
        if ended:
            live = self._retire(live, ended)
        if not live:
            return logits, live
        step = Step(
            token_ids=torch.tensor([row.token_ids[-1] for row in live]),
            lo=0,
            hi=len(live),
            starts=torch.tensor([row.own + len(row.token_ids) - 1 for row in live]),
            counts=torch.ones(len(live), dtype=torch.int64),
            prefixes=prefixes_of(live),
        )
        return self._decoder.logits(self._decoder.forward(step, self._space)), live

    def _take(
        self, row: Row, token: int, logprob: float, cancelled: Callable[[GenerateRequest], bool] | None
    ) -> FinishReason | None:
        """Append a sampled token; the reason if the turn ends with it."""
        if cancelled is not None and cancelled(row.request):
            return "abort"
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        if token in row.request.sampling.stop_token_ids:
            return "stop"
        if row.watch is not None and row.watch.closed(row.token_ids):
            return "fence"
        if len(row.token_ids) == row.budget:
            return "context" if row.clamped else "length"
        return None

    def _retire(self, live: list[Row], ended: list[Row]) -> list[Row]:
        """Cache the ended rows' keys and values and close the gaps with the last rows."""
        for row in ended:
            self._keep(row)
        live = list(live)
        for row in sorted(ended, key=lambda row: row.place, reverse=True):
            last = live.pop()
            if last is not row:
                self._space.copy_row(last.place, row.place, last.own + len(last.token_ids) - 1)
                last.place = row.place
                live[row.place] = last
        return live

    def _keep(self, row: Row) -> None:
        done = row.token_ids[:-1]  # the last token was sampled but not run
        own = row.own + len(done)
        session = CachedSession(
            token_ids=[*row.request.prompt_ids, *done],
            prefix=row.prefix,
            k=self._space.k[:, row.place, :, :own].clone(memory_format=torch.contiguous_format),
            v=self._space.v[:, row.place, :, :own].clone(memory_format=torch.contiguous_format),
        )
        self._cache.add_session(row.request.session_id, session)

    def _result(self, row: Row, reason: FinishReason) -> GenerateResult:
        return GenerateResult(tuple(row.token_ids), tuple(row.logprobs), reason, self.policy_version)


def _default_kv_tokens(config: DecoderConfig) -> int:
    import psutil

    a_token = 2 * 4 * config.layers * config.kv_heads * config.head_dim
    return max(config.context, int(psutil.virtual_memory().total * _MEMORY_SHARE) // a_token)
