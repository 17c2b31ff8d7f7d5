"""Forward and backward passes over a batch's plan, its packs spread over threads that each compute alone.

A pack's operations run on one thread, packs run side by side: threads that meet only between packs keep their speed
when something else uses a core, where threads inside each operation wait for each other thousands of times a second.
Results are added up in the order of the packs, so timing changes no bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from termrl.training.batch import Batch
from termrl.training.decoder import KeyValues, PackedDecoder, attention_tiles
from termrl.training.losses import LossTerms
from termrl.training.packing import Pack

TokenLoss = Callable[[Tensor, Tensor], LossTerms]
"""(logprobs of some of the batch's tokens, which ones) → their part of the loss. Called from several threads."""

Result = TypeVar("Result")


@dataclass
class PassSums:
    """What one pass over a batch adds up; see :class:`termrl.training.losses.LossTerms`.

    ``entropy`` is summed over the ``rows`` distinct positions that predict a trained token.
    """

    loss: float = 0.0
    clipped: int = 0
    kl_old: float = 0.0
    kl_reference: float = 0.0
    entropy: float = 0.0
    rows: int = 0
    rejected: int = 0

    def __iadd__(self, other: PassSums) -> PassSums:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def forward_backward(decoder: PackedDecoder, batch: Batch, token_loss: TokenLoss, *, threads: int) -> PassSums:
    """Add the batch's gradient to that of ``decoder``'s parameters.

    The common prefix runs once. Its keys and values are leaves to the packs, whose backward passes add up the leaves'
    gradients; one backward pass through the prefix then ends the chain rule.
    """
    plan = batch.plan
    prefix: list[KeyValues] = []
    if len(plan.prefix_ids):
        prefix = decoder.prefix(torch.from_numpy(plan.prefix_ids), attention_tiles(plan.prefix_tiles))
    leaves = [(_leaf(key), _leaf(value)) for key, value in prefix]
    flat_leaves = [leaf for pair in leaves for leaf in pair]
    parameters = decoder.parameters()

    def run(pack: Pack) -> tuple[PassSums, tuple[Tensor | None, ...]]:
        logprob, entropy = _pack_logprobs(decoder, pack, leaves, pristine=False)
        index, tokens = _flat_order(batch, pack)
        terms = token_loss(logprob.index_select(0, index), tokens)
        gradients = torch.autograd.grad(terms.loss, [*parameters, *flat_leaves], allow_unused=True)
        own = PassSums(
            float(terms.loss.detach()),
            terms.clipped,
            terms.kl_old,
            terms.kl_reference,
            float(entropy.sum()),
            len(entropy),
            terms.rejected,
        )
        return own, gradients

    sums = PassSums()
    for own, gradients in _map(run, plan.packs, threads):
        sums += own
        for tensor, gradient in zip([*parameters, *flat_leaves], gradients, strict=True):
            if gradient is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
    outputs = [
        (output, leaf.grad)
        for output, leaf in zip([tensor for pair in prefix for tensor in pair], flat_leaves, strict=True)
        if output.requires_grad and leaf.grad is not None
    ]
    if outputs:
        torch.autograd.backward([output for output, _ in outputs], [gradient for _, gradient in outputs])
    return sums


@torch.no_grad()
def evaluate(decoder: PackedDecoder, batch: Batch, *, pristine: bool, threads: int) -> Tensor:
    """Logprob of each of the batch's tokens, in nats, under the current weights or the base's, without a graph."""
    plan = batch.plan
    prefix: list[KeyValues] = []
    if len(plan.prefix_ids):
        tiles = attention_tiles(plan.prefix_tiles)
        prefix = decoder.prefix(torch.from_numpy(plan.prefix_ids), tiles, pristine=pristine)

    def run(pack: Pack) -> Tensor:
        with torch.no_grad():
            return _pack_logprobs(decoder, pack, prefix, pristine=pristine)[0]

    result = torch.zeros_like(batch.captured)
    for pack, logprob in zip(plan.packs, _map(run, plan.packs, threads), strict=True):
        index, tokens = _flat_order(batch, pack)
        result[tokens] = logprob.index_select(0, index)
    return result


def _pack_logprobs(
    decoder: PackedDecoder, pack: Pack, prefix: Sequence[KeyValues], *, pristine: bool
) -> tuple[Tensor, Tensor]:
    return decoder.logprobs(
        torch.from_numpy(pack.token_ids),
        torch.from_numpy(pack.positions),
        attention_tiles(pack.tiles),
        prefix or None,
        torch.from_numpy(pack.rows),
        torch.from_numpy(pack.row_temperature).to(decoder.dtype),
        torch.from_numpy(pack.target_row),
        torch.from_numpy(pack.target_token),
        pristine=pristine,
    )


def _map(function: Callable[[Pack], Result], packs: Sequence[Pack], threads: int) -> Iterator[Result]:
    """``function`` of each pack, in order, on up to ``threads`` threads that each compute alone."""
    workers = min(threads, len(packs))
    if workers <= 1:
        yield from map(function, packs)
        return
    ready = Barrier(workers + 1)
    before = torch.get_num_threads()

    def compute_alone() -> None:
        torch.set_num_threads(1)
        ready.wait()

    with ThreadPoolExecutor(workers) as pool:
        starts = [pool.submit(compute_alone) for _ in range(workers)]
        ready.wait()
        for start in starts:
            start.result()
        # The setting is a thread's own, but what threads that start later get is the last one made.
        torch.set_num_threads(before)
        waiting: deque[Future[Result]] = deque()
        for pack in packs:
            if len(waiting) > workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, pack))
        while waiting:
            yield waiting.popleft().result()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().requires_grad_()


def _flat_order(batch: Batch, pack: Pack) -> tuple[Tensor, Tensor]:
    """For the tokens of a pack's members: which of the pack's targets each is, and which of the batch's tokens."""
    index = torch.cat([torch.from_numpy(targets) for targets in pack.member_targets])
    tokens = torch.cat([torch.arange(batch.spans[m].start, batch.spans[m].stop) for m in pack.members])
    return index, tokens
