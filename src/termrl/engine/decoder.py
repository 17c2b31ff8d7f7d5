"""The forward pass: ragged batches of new tokens over cached keys and values, with a shared prefix computed once.

A row's context is an optional shared :class:`Prefix` followed by the row's own tokens. Attention runs over the two
parts apart, the prefix part as one product for all rows that share it, and the parts are merged by their running
maxima and sums, which is exact (Milakov & Gimelshein 2018; the same identity as in FlashAttention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from termrl.engine.weights import DecoderConfig, Weights


@dataclass(eq=False)
class Prefix:
    """Keys and values of a token sequence that several rows begin with, ``[layers, kv_heads, tokens, head_dim]``."""

    token_ids: tuple[int, ...]
    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


class Workspace:
    """Keys and values of a batch's own tokens, ``[layers, rows, kv_heads, capacity, head_dim]``.

    The memory is mapped at once but touched only where tokens are written; what is read beyond a row's length is
    masked and always finite.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self._k = self._v = torch.empty(0)
        self.k = self.v = torch.empty(0)

    def shape(self, rows: int, capacity: int) -> None:
        """Make room for ``rows`` rows of ``capacity`` tokens; what was in it is lost."""
        c = self._config
        shape = (c.layers, rows, c.kv_heads, capacity, c.head_dim)
        size = c.layers * rows * c.kv_heads * capacity * c.head_dim
        if self._k.numel() < size:
            self._k = self._v = torch.empty(0)  # free before allocating
            self._k, self._v = _lazy_zeros(size), _lazy_zeros(size)
        self.k, self.v = self._k[:size].view(shape), self._v[:size].view(shape)

    def grow(self, rows: int, capacity: int, keep: int) -> None:
        """Make room for at least ``rows`` rows of ``capacity`` tokens; the first ``keep`` rows stay as they are."""
        c = self._config
        has_rows, has_capacity = (self.k.shape[1], self.k.shape[3]) if self.k.numel() else (0, 0)
        if rows <= has_rows and capacity <= has_capacity:
            return
        # doubled, so that a batch that grows row by row moves seldom; what is not written costs no memory
        rows = has_rows if rows <= has_rows else max(rows, 2 * has_rows)
        capacity = has_capacity if capacity <= has_capacity else max(capacity, 2 * has_capacity)
        shape = (c.layers, rows, c.kv_heads, capacity, c.head_dim)
        for name in ("k", "v"):
            old, new = getattr(self, name), _lazy_zeros(math.prod(shape)).view(shape)
            if keep:
                new[:, :keep, :, :has_capacity] = old[:, :keep]
            setattr(self, name, new)
            setattr(self, f"_{name}", new.view(-1))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another's."""
        for buffer in (self.k, self.v):
            buffer[:, target, :, :length] = buffer[:, source, :, :length]


def _lazy_zeros(size: int) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.zeros(size, dtype=np.float32))  # calloc: pages are touched on first write


@dataclass
class Step:
    """New tokens of the workspace rows ``lo:hi``, ``counts[i]`` of them for row ``lo + i``, laid end to end.

    Attributes:
        token_ids: ``[tokens]``.
        starts: for each row, how many own tokens are cached already.
        counts: for each row, how many tokens are new (at least 1).
        prefixes: each shared prefix, with the rows (relative to ``lo``) that begin with it.
    """

    token_ids: Tensor
    lo: int
    hi: int
    starts: Tensor
    counts: Tensor
    prefixes: Sequence[tuple[Prefix, Tensor | None]]


@dataclass
class _Plan:
    """What is the same for every layer of one step."""

    rows: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    length: int
    width: int
    mask: Tensor
    padded: tuple[Tensor, Tensor] | None


class Decoder:
    """A Llama-like decoder over :class:`Weights`."""

    def __init__(self, weights: Weights) -> None:
        self.config = weights.config
        self.weights = weights
        c = self.config
        frequency = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.int64).float() / c.head_dim)
        angle = torch.arange(c.context).float()[:, None] * frequency
        self._cos = torch.cat((angle, angle), -1).cos()
        self._sin = torch.cat((-angle, angle), -1).sin()
        self._scale = c.head_dim**-0.5

    def forward(self, step: Step, space: Workspace) -> Tensor:
        """Run the new tokens, appending their keys and values to ``space``.

        Returns:
            The last layer's hidden state at each row's last new token, ``[rows, hidden]``, for :meth:`logits`.
        """
        plan = self._plan(step)
        x = self.weights.embedding[step.token_ids]
        for i, layer in enumerate(self.weights.layers):
            attended = self._attention(
                i, F.rms_norm(x, (self.config.hidden,), layer.norm1, self.config.eps), step, plan, space
            )
            x = x + layer.out(attended)
            gate, up = layer.gate_up(F.rms_norm(x, (self.config.hidden,), layer.norm2, self.config.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        last = step.counts.cumsum(0) - 1
        return x[last]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: ``[rows, vocab]``."""
        return self.weights.head(F.rms_norm(hidden, (self.config.hidden,), self.weights.norm, self.config.eps))

    def _plan(self, step: Step) -> _Plan:
        rows = step.hi - step.lo
        width = int(step.counts.max())
        index = torch.repeat_interleave(torch.arange(rows), step.counts)
        offset = torch.arange(len(index)) - (step.counts.cumsum(0) - step.counts)[index]
        slots = step.starts[index] + offset
        before = torch.zeros(rows, dtype=torch.int64)
        for prefix, members in step.prefixes:
            before[slice(None) if members is None else members] = len(prefix)
        positions = slots + before[index]
        length = int(slots.max()) + 1
        ragged = width > 1 and len(index) != rows * width
        # a padded query may see everything: its result is thrown away, and no row is without a key
        visible = torch.full((rows, width), length - 1)
        visible[index, offset] = slots
        hidden = torch.arange(length) > visible[:, :, None]
        mask = torch.zeros(rows, 1, width, 1, length).masked_fill_(hidden[:, None, :, None, :], -torch.inf)
        return _Plan(
            rows=index + step.lo,
            slots=slots,
            cos=self._cos[positions][:, None],
            sin=self._sin[positions][:, None],
            length=length,
            width=width,
            mask=mask,
            padded=(index, offset) if ragged else None,
        )

    def _attention(self, i: int, x: Tensor, step: Step, plan: _Plan, space: Workspace) -> Tensor:
        c, layer = self.config, self.weights.layers[i]
        tokens, rows = len(x), step.hi - step.lo
        qkv = layer.qkv(x).view(tokens, c.heads + 2 * c.kv_heads, c.head_dim)
        qk = qkv[:, : c.heads + c.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(qk[:, : c.heads], (c.head_dim,), layer.q_norm, c.eps)
            k = F.rms_norm(qk[:, c.heads :], (c.head_dim,), layer.k_norm, c.eps)
            qk = torch.cat((q, k), 1)
        qk = qk * plan.cos + qk.roll(c.head_dim // 2, -1) * plan.sin
        space.k[i][plan.rows, :, plan.slots] = qk[:, c.heads :]
        space.v[i][plan.rows, :, plan.slots] = qkv[:, c.heads + c.kv_heads :]
        q = qk[:, : c.heads] * self._scale
        group = c.heads // c.kv_heads
        if plan.padded is not None:
            wide = q.new_zeros(rows, plan.width, c.heads, c.head_dim)
            wide[plan.padded] = q
            q = wide
        q = q.reshape(rows, plan.width, c.kv_heads, group, c.head_dim).transpose(1, 2)
        q = q.reshape(rows, c.kv_heads, plan.width * group, c.head_dim)
        out = self._attend(i, q, step, plan, space)
        out = out.view(rows, c.kv_heads, plan.width, group, c.head_dim).transpose(1, 2)
        out = out.reshape(rows, plan.width, c.heads * c.head_dim)
        return out[plan.padded] if plan.padded is not None else out.view(tokens, c.heads * c.head_dim)

    def _attend(self, i: int, q: Tensor, step: Step, plan: _Plan, space: Workspace) -> Tensor:
        """``q`` is ``[rows, kv_heads, width * group, head_dim]``, scaled; the result has its shape."""
        c = self.config
        rows, _, queries, dim = q.shape
        k = space.k[i][step.lo : step.hi].flatten(0, 1)[:, : plan.length]
        v = space.v[i][step.lo : step.hi].flatten(0, 1)[:, : plan.length]
        scores = torch.bmm(q.flatten(0, 1), k.transpose(1, 2))
        scores.view(rows, c.kv_heads, plan.width, -1, plan.length).add_(plan.mask)
        top, total, out = (part.view(rows, c.kv_heads, queries, -1) for part in _softmax_parts(scores, v))
        if not step.prefixes:
            return out / total
        for prefix, members in step.prefixes:
            mine = q if members is None else q[members]
            flat = mine.transpose(0, 1).reshape(c.kv_heads, -1, dim)
            scores = torch.bmm(flat, prefix.k[i].transpose(1, 2))
            parts = (
                part.view(c.kv_heads, len(mine), queries, -1).transpose(0, 1)
                for part in _softmax_parts(scores, prefix.v[i])
            )
            at = slice(None) if members is None else members
            top[at], total[at], out[at] = _merge((top[at], total[at], out[at]), tuple(parts))
        return out / total


def _softmax_parts(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exponentials, and weighted sum of ``v``, not yet divided. Overwrites ``scores``."""
    top = scores.amax(-1, keepdim=True)
    scores.sub_(top).exp_()
    return top, scores.sum(-1, keepdim=True), torch.bmm(scores, v)


def _merge(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Join the softmax parts over two disjoint sets of keys."""
    top = torch.maximum(a[0], b[0])
    left, right = (a[0] - top).exp_(), (b[0] - top).exp_()
    return top, a[1] * left + b[1] * right, a[2] * left + b[2] * right
