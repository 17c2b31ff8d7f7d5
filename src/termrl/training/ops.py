"""The differentiable operations of a decoder over a prefix tree, each with its gradient written out.

Writing the gradients out keeps few activations, gives frozen weights no gradient at all, and lets a low-rank update
cost four thin products in the backward pass and none in the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

HEAD_ROWS = 256
"""Rows of logits [rows, vocabulary] that exist at a time."""


@dataclass(frozen=True)
class AttentionTile:
    """A :class:`termrl.training.packing.Tile` as tensors; ``hidden`` is ``None`` where nothing is hidden."""

    start: int
    stop: int
    ancestors: Tensor
    hidden: Tensor


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps)).unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grads[0] * x).mul_(scale).flatten(0, -2).sum(0)
        grad = grads[0] * weight
        inner = torch.linalg.vecdot(grad, x).unsqueeze(-1)
        inner = inner.mul_(scale.pow(3)).div_(-x.shape[-1])
        return grad.mul_(scale).addcmul_(x, inner), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension."""
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
        spans: Sequence[tuple[int, int]],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scaling, ctx.spans = scaling, spans
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if a is None or not ctx.needs_input_grad[3]:
            return grad_x, None, None, None, None, None, None
        rank = b.shape[1]
        low = x @ a.t()
        grad_low = torch.empty_like(low)
        grad_b = torch.empty_like(b)
        row = 0
        for block, (start, stop) in enumerate(ctx.spans):
            part, columns = grad[:, start:stop], slice(block * rank, (block + 1) * rank)
            rows = slice(row, row + stop - start)
            grad_b[rows] = part.t() @ low[:, columns]
            grad_low[:, columns] = part @ b[rows]
            row = rows.stop
        grad_a = grad_low.t() @ x
        return grad_x, None, None, grad_a.mul_(ctx.scaling), grad_b.mul_(ctx.scaling), None, None


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    *,
    scaling: float,
    spans: Sequence[tuple[int, int]],
) -> Tensor:
    """x · weightᵀ + bias, where ``weight`` = base + scaling · B·A already; gradients reach ``x``, ``a`` and ``b``.

    Args:
        x: [tokens, in].
        weight: [out, in], the effective weight; several layers with the same input may be stacked in it.
        bias: [out], frozen, or ``None``.
        a: [blocks · rank, in], the stacked A of the layers that are trained; ``None`` if none is.
        b: [Σ span lengths, rank], their stacked B.
        scaling: alpha / rank.
        spans: the rows of ``weight`` that belong to each trained layer, one a block.
    """
    return _LoraLinear.apply(x, weight, bias, a, b, scaling, spans)  # type: ignore[no-any-return]


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, grad.t() @ x, grad.sum(0) if ctx.needs_input_grad[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias for [tokens, in], with gradients to all three."""
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        torch.mul(grads[0], silu, out=grad_up)
        # d silu / d gate = sigmoid + silu · (1 - sigmoid)
        slope = silu.addcmul_(silu, sigmoid, value=-1.0).add_(sigmoid)
        torch.mul(grads[0], up, out=grad_gate)
        grad_gate.mul_(slope)
        return result


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up for [tokens, 2 · width] that holds gate and up side by side."""
    return _SwiGlu.apply(gate_up)  # type: ignore[no-any-return]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    x_low, x_high = x.chunk(2, dim=-1)
    low, high = out.chunk(2, dim=-1)
    torch.mul(x_low, cos, out=low)
    low.addcmul_(x_high, sin, value=-1.0)
    torch.mul(x_high, cos, out=high)
    high.addcmul_(x_low, sin)
    return out


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [tokens, heads, dim]; ``cos`` and ``sin`` are [tokens, 1, dim / 2]."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


def _scores(queries: Tensor, keys: Tensor, tile: AttentionTile, prefix: int) -> Tensor:
    """Attention weights [kv heads, group · tile, keys] of one tile."""
    heads, rows, _ = queries.shape
    scores = torch.bmm(queries, keys.transpose(1, 2))
    length = tile.stop - tile.start
    scores.view(heads, rows // length, length, -1)[..., prefix:].masked_fill_(tile.hidden, float("-inf"))
    return torch.softmax(scores, dim=-1)


def _tile_keys(own: Tensor, shared: Tensor | None, tile: AttentionTile) -> Tensor:
    """[kv heads, prefix + ancestors + tile, dim]: what the tile's queries can see."""
    parts = [] if shared is None else [shared]
    if len(tile.ancestors):
        parts.append(own.index_select(1, tile.ancestors))
    parts.append(own[:, tile.start : tile.stop])
    return torch.cat(parts, dim=1)


def _scatter_keys(grad: Tensor, own: Tensor, shared: Tensor | None, tile: AttentionTile) -> None:
    """Add the gradient of :func:`_tile_keys` to those of its sources."""
    prefix = 0
    if shared is not None:
        prefix = shared.shape[1]
        shared += grad[:, :prefix]
    middle = prefix + len(tile.ancestors)
    if middle > prefix:
        own.index_add_(1, tile.ancestors, grad[:, prefix:middle])
    own[:, tile.start : tile.stop] += grad[:, middle:]


class _TreeAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_k: Tensor | None,
        prefix_v: Tensor | None,
        tiles: Sequence[AttentionTile],
        scale: float,
    ) -> Tensor:
        tokens, heads, dim = q.shape
        kv_heads = k.shape[1]
        grouped = (kv_heads, heads // kv_heads)
        queries = q.view(tokens, *grouped, dim).permute(1, 2, 0, 3) * scale
        keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        prefix = 0 if prefix_k is None else prefix_k.shape[1]
        out = torch.empty(tokens, *grouped, dim, dtype=q.dtype)
        for tile in tiles:
            tile_queries = queries[:, :, tile.start : tile.stop].reshape(kv_heads, -1, dim)
            weights = _scores(tile_queries, _tile_keys(keys, prefix_k, tile), tile, prefix)
            result = torch.bmm(weights, _tile_keys(values, prefix_v, tile))
            out[tile.start : tile.stop] = result.view(*grouped, -1, dim).permute(2, 0, 1, 3)
        ctx.save_for_backward(queries, keys, values, prefix_k, prefix_v, out)
        ctx.tiles, ctx.scale = tiles, scale
        return out.view(tokens, heads * dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, prefix_k, prefix_v, out = ctx.saved_tensors
        kv_heads, group, tokens, dim = queries.shape
        grad_out = grads[0].view(tokens, kv_heads, group, dim)
        # Σ over keys of weight · d(loss)/d(weight), the softmax's own gradient term.
        centre = (grad_out * out).sum(-1).permute(1, 2, 0)
        grad_out = grad_out.permute(1, 2, 0, 3)
        grad_q = torch.empty(tokens, kv_heads, group, dim, dtype=out.dtype)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        grad_prefix_k = None if prefix_k is None else torch.zeros_like(prefix_k)
        grad_prefix_v = None if prefix_v is None else torch.zeros_like(prefix_v)
        prefix = 0 if prefix_k is None else prefix_k.shape[1]
        for tile in ctx.tiles:
            span = slice(tile.start, tile.stop)
            tile_queries = queries[:, :, span].reshape(kv_heads, -1, dim)
            tile_keys, tile_values = _tile_keys(keys, prefix_k, tile), _tile_keys(values, prefix_v, tile)
            tile_grad = grad_out[:, :, span].reshape(kv_heads, -1, dim)
            weights = _scores(tile_queries, tile_keys, tile, prefix)
            _scatter_keys(torch.bmm(weights.transpose(1, 2), tile_grad), grad_v, grad_prefix_v, tile)
            grad_scores = torch.bmm(tile_grad, tile_values.transpose(1, 2))
            grad_scores.sub_(centre[:, :, span].reshape(kv_heads, -1, 1)).mul_(weights)
            _scatter_keys(torch.bmm(grad_scores.transpose(1, 2), tile_queries), grad_k, grad_prefix_k, tile)
            result = torch.bmm(grad_scores, tile_keys).mul_(ctx.scale)
            grad_q[span] = result.view(kv_heads, group, -1, dim).permute(2, 0, 1, 3)
        grad_q = grad_q.view(tokens, kv_heads * group, dim)
        return grad_q, grad_k.transpose(0, 1), grad_v.transpose(0, 1), grad_prefix_k, grad_prefix_v, None, None


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor] | None,
    tiles: Sequence[AttentionTile],
    *,
    scale: float,
) -> Tensor:
    """Attention in which each node sees the common prefix, its ancestors and itself.

    Memory grows with a tile's keys, not with the square of the tokens; the weights are made again in the backward pass.

    Args:
        q: [nodes, heads, dim], rotated.
        k, v: [nodes, kv heads, dim], ``k`` rotated.
        prefix: keys and values [kv heads, prefix, dim] of the common prefix, or ``None``.
        tiles: all nodes, cut into tiles.
        scale: factor of the scores.

    Returns:
        [nodes, heads · dim].
    """
    prefix_k, prefix_v = prefix if prefix is not None else (None, None)
    return _TreeAttention.apply(q, k, v, prefix_k, prefix_v, tiles, scale)  # type: ignore[no-any-return]


class _TargetLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, temperature: Tensor, target_row: Tensor, target_token: Tensor
    ) -> tuple[Tensor, Tensor]:
        scaled = hidden / temperature[:, None]
        rows = len(scaled)
        with_grad = ctx.needs_input_grad[0]
        chosen = head.index_select(0, target_token)
        mean = torch.empty_like(scaled) if with_grad else None
        log_total = torch.empty(rows, dtype=scaled.dtype)
        buffer = torch.empty(min(HEAD_ROWS, rows), len(head), dtype=scaled.dtype)
        for start in range(0, rows, HEAD_ROWS):
            part = slice(start, min(start + HEAD_ROWS, rows))
            logits = torch.mm(scaled[part], head.t(), out=buffer[: part.stop - start])
            top = logits.amax(dim=-1)
            total = logits.sub_(top[:, None]).exp_().sum(dim=-1)
            log_total[part] = total.log() + top
            if mean is not None:
                mean[part] = (logits @ head).div_(total[:, None])
        picked = torch.linalg.vecdot(scaled.index_select(0, target_row), chosen)
        logprob = picked - log_total.index_select(0, target_row)
        entropy = torch.zeros_like(log_total) if mean is None else log_total - torch.linalg.vecdot(mean, scaled)
        whole = (scaled, head, log_total, target_token) if ctx.needs_input_grad[1] else (None,) * 4
        ctx.save_for_backward(mean, chosen, temperature, target_row, *whole)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mean, chosen, temperature, target_row, scaled, head, log_total, target_token = ctx.saved_tensors
        grad = grads[0]
        per_row = torch.zeros_like(temperature).index_add_(0, target_row, grad)
        result = mean.mul(-per_row[:, None]).index_add_(0, target_row, chosen * grad[:, None])
        grad_head = None
        if ctx.needs_input_grad[1]:
            grad_head = torch.zeros_like(head)
            for start in range(0, len(scaled), HEAD_ROWS):
                part = slice(start, start + HEAD_ROWS)
                probabilities = torch.mm(scaled[part], head.t()).sub_(log_total[part, None]).exp_()
                grad_head.addmm_(probabilities.t(), scaled[part] * per_row[part, None], alpha=-1.0)
            grad_head.index_add_(0, target_token, scaled.index_select(0, target_row) * grad[:, None])
        return result.div_(temperature[:, None]), grad_head, None, None, None


def target_logprobs(
    hidden: Tensor, head: Tensor, temperature: Tensor, target_row: Tensor, target_token: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of chosen tokens under softmax(hidden · headᵀ / temperature), without keeping any logits.

    d logprob / d hidden = (head[token] - Σ_v p_v · head[v]) / temperature: the expected row of the frozen head is made
    in the forward pass while a chunk's probabilities exist, so the backward pass needs no logits. A head that is
    trained needs them: d logprob / d head[v] = (1[v = token] - p_v) · hidden / temperature, and they are made again.

    Args:
        hidden: [rows, dim], after the final norm.
        head: [vocabulary, dim], frozen or trained.
        temperature: [rows].
        target_row, target_token: [targets] which row predicts which token; a row may predict several.

    Returns:
        logprobs [targets] in nats, and each row's entropy [rows] in nats (no gradient; zeros where ``hidden`` needs no
        gradient).
    """
    return _TargetLogprobs.apply(hidden, head, temperature, target_row, target_token)  # type: ignore[no-any-return]
