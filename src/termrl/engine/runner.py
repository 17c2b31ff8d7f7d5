"""One batch from prompts to completions: ragged prefill, then one token a live row at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor

from termrl.capture.upstreams import FinishReason, GenerateRequest
from termrl.engine.cache import CachedSession
from termrl.engine.decoder import Decoder, Prefix, Step, Workspace
from termrl.engine.planning import PASS_SCORES, PASS_TOKENS, Row, cut_batches, cut_passes, find_twins, prefixes_of
from termrl.engine.sampling import sample, uniform

Cancelled = Callable[[GenerateRequest], bool]


@dataclass
class EngineStats:
    """Running totals. ``reused_tokens`` are prompt tokens that were taken from a cache or shared in the batch.

    Seconds are those of the workers together: with two workers, up to two for each of the clock's.
    """

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

    def add(self, other: EngineStats) -> None:
        """Add another's totals."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


class Runner:
    """Runs batches over one workspace, in one thread at a time. Several may share a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._space = Workspace(decoder.config)
        self.stats = EngineStats()

    def free(self) -> None:
        """Let the workspace's memory go; the next batch makes it anew."""
        self._space = Workspace(self._decoder.config)

    @torch.inference_mode()
    def run(self, rows: list[Row], max_tokens: int, cancelled: Cancelled | None) -> None:
        """Generate for all rows, in batches of at most ``max_tokens`` own tokens; fills each row's outcome."""
        for batch in cut_batches(rows, max_tokens):
            self._generate_batch(batch, cancelled)

    @torch.inference_mode()
    def prefix(self, token_ids: tuple[int, ...]) -> Prefix:
        """Compute the keys and values of a prefix."""
        begun = time.perf_counter()
        self._space.shape(1, len(token_ids))
        self._pass_in_pieces(0, 0, token_ids, None)
        self.stats.prefill_s += time.perf_counter() - begun
        return Prefix(token_ids, self._space.k[:, 0].clone(), self._space.v[:, 0].clone())

    @torch.inference_mode()
    def join(self, logits: Tensor, live: list[Row], rows: list[Row]) -> tuple[Tensor, list[Row]]:
        """Compute the prompts of ``rows`` beside the rows that are being decoded.

        Args:
            logits: of the live rows' next tokens, ``[live, vocab]``, by their places.
            live: the rows in decoding, by place; this runner holds their keys and values.
            rows: the new ones.

        Returns:
            Logits and rows of both, by place, for :meth:`step`.
        """
        begun = time.perf_counter()
        find_twins(rows)
        self._space.grow(len(live) + len(rows), max(row.own + row.budget for row in [*live, *rows]), keep=len(live))
        own = self._prefill(rows, base=len(live))
        self.stats.prompt_tokens += sum(len(row.request.prompt_ids) for row in rows)
        self.stats.prefill_s += time.perf_counter() - begun
        return torch.cat((logits, own)) if live else own, [*live, *sorted(rows, key=lambda row: row.place)]

    @torch.inference_mode()
    def step(self, logits: Tensor, live: list[Row], cancelled: Cancelled | None) -> tuple[Tensor, list[Row]]:
        """One token for each live row; those that end have a reason afterwards and are no longer among the rows."""
        begun = time.perf_counter()
        before = live
        logits, live = self._advance(logits, live, cancelled)
        self.stats.decode_s += time.perf_counter() - begun
        self.stats.decoded_tokens += len(before) - sum(row.reason == "abort" for row in before)
        return logits, live

    def _generate_batch(self, rows: list[Row], cancelled: Cancelled | None) -> None:
        begun = time.perf_counter()
        find_twins(rows)
        self._space.shape(len(rows), max(row.own + row.budget for row in rows))
        logits = self._prefill(rows)
        prefilled = time.perf_counter()
        live = sorted(rows, key=lambda row: row.place)
        while live:
            logits, live = self._advance(logits, live, cancelled)
        self.stats.batches += 1
        self.stats.prompt_tokens += sum(len(row.request.prompt_ids) for row in rows)
        self.stats.prefill_s += prefilled - begun
        self.stats.decode_s += time.perf_counter() - prefilled
        self.stats.decoded_tokens += sum(len(row.token_ids) for row in rows)

    def _prefill(self, rows: list[Row], base: int = 0) -> Tensor:
        """Compute the prompts into the workspace from place ``base`` on; the logits ``[rows, vocab]``, by place."""
        # rows of like length stand side by side, so that a pass pads little
        firsts = sorted((r for r in rows if r.twin is None), key=lambda r: (r.prefix is None, r.own - r.cached, r.own))
        placed = firsts + [r for r in rows if r.twin is not None]
        for place, row in enumerate(placed):
            row.place = base + place
        for row in firsts:
            if row.session is not None:
                self._space.k[:, row.place, :, : row.cached] = row.session.k[:, :, : row.cached]
                self._space.v[:, row.place, :, : row.cached] = row.session.v[:, :, : row.cached]
        hidden = torch.cat([self._prefill_pass(group) for group in cut_passes(firsts, self._decoder.config.heads)])
        logits = self._decoder.logits(hidden)
        source = [row.place if row.twin is None else row.twin.place for row in placed]
        for row in placed:
            if row.twin is not None:
                self._space.copy_row(row.twin.place, row.place, row.own)
        self.stats.reused_tokens += sum(len(r.request.prompt_ids) - (r.own - r.cached) for r in firsts)
        self.stats.reused_tokens += sum(len(r.request.prompt_ids) for r in rows if r.twin is not None)
        return logits if len(firsts) == len(rows) else logits[torch.tensor(source) - base]

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
        size = max(16, min(PASS_TOKENS, PASS_SCORES // (self._decoder.config.heads * reach)))
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
        cancelled: Cancelled | None,
    ) -> tuple[Tensor, list[Row]]:
        """Sample one token a live row, retire the rows that end, and run the rest one token on."""
        numbers = [uniform(row.seed, len(row.token_ids)) for row in live]
        tokens, logprobs = sample(logits, [row.request.sampling for row in live], numbers)
        ended: list[Row] = []
        for row, token, logprob in zip(live, tokens, logprobs, strict=True):
            row.reason = self._take(row, token, logprob, cancelled)
            if row.reason is not None:
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

    def _take(self, row: Row, token: int, logprob: float, cancelled: Cancelled | None) -> FinishReason | None:
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
        row.kept = CachedSession(
            token_ids=[*row.request.prompt_ids, *done],
            prefix=row.prefix,
            k=self._space.k[:, row.place, :, :own].clone(memory_format=torch.contiguous_format),
            v=self._space.v[:, row.place, :, :own].clone(memory_format=torch.contiguous_format),
        )
