"""Sampling with exact log-probabilities, each row from its own seed.

A row's i-th token is drawn by inverting the distribution at one uniform number that depends on the row's seed and i
alone, so neither the other rows nor the batch's size touch it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from termrl.capture.upstreams import SamplingParams


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) of 53 bits from blake2b(seed, index)."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> tuple[list[int], list[float]]:
    """Draw one token a row.

    Args:
        logits: ``[rows, vocab]`` fp32; overwritten.
        params: one a row; temperature 0 takes the most probable token, whose logprob is then 0.
        numbers: one uniform number a row.

    Returns:
        Token ids, and their natural-log probabilities under the distribution that was sampled: softmax of
        logits / temperature, cut to top-k and top-p and renormalised where those are on.
    """
    greedy = [p.temperature == 0 for p in params]
    if all(greedy):
        return logits.argmax(-1).tolist(), [0.0] * len(params)
    best = logits.argmax(-1) if any(greedy) else None
    scale = [1.0 if p.temperature == 0 else 1.0 / p.temperature for p in params]
    if any(s != 1.0 for s in scale):
        logits.mul_(torch.tensor(scale)[:, None])
    for row, p in enumerate(params):
        if p.temperature != 0 and (p.top_k > 0 or p.top_p < 1.0):
            logits[row] = _cut(logits[row], p.top_k, p.top_p)
    logits.sub_(logits.amax(-1, keepdim=True))
    weights = logits.exp()
    chosen, total = _invert(weights, torch.tensor(numbers, dtype=torch.float64))
    logprobs = logits.gather(1, chosen[:, None])[:, 0].double() - total.log()
    if best is not None:
        is_greedy = torch.tensor(greedy)
        chosen = torch.where(is_greedy, best, chosen)
        logprobs = logprobs.masked_fill(is_greedy, 0.0)
    return chosen.tolist(), logprobs.tolist()


def _invert(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative weight exceeds number × total, in two levels; and the totals (float64)."""
    rows, vocab = weights.shape
    block = 256 if vocab % 256 == 0 else vocab
    blocks = weights.view(rows, vocab // block, block)
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = edges[:, -1]
    target = (numbers * total)[:, None]
    chosen = _first_above(edges, target)
    at = torch.arange(rows)
    before = torch.where(chosen > 0, edges[at, chosen - 1], 0.0)
    inner = blocks[at, chosen].double().cumsum(-1) + before[:, None]
    return chosen * block + _first_above(inner, target), total


def _first_above(edges: Tensor, target: Tensor) -> Tensor:
    """Index of the first edge above the target; where rounding leaves none, the last that carries weight."""
    found = torch.searchsorted(edges, target, right=True)[:, 0]
    last = torch.searchsorted(edges, edges[:, -1:].contiguous(), right=False)[:, 0]
    return torch.minimum(found, last)


def _cut(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the k most probable tokens, then the fewest whose probability reaches p; -inf elsewhere."""
    order = logits.argsort(descending=True, stable=True)
    ranked = logits[order]
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1.0:
        p = ranked.masked_fill(~keep, -torch.inf).double().softmax(-1)
        keep &= (p.cumsum(-1) - p) < top_p
    keep[0] = True
    return torch.full_like(logits, -torch.inf).scatter(0, order[keep], ranked[keep])
