"""Linear layers that read the same input, stacked into one product: with a low-rank update, or trained whole.

With a low-rank update the effective weight is the pristine base + scaling · B·A, made anew after each step: nothing is
merged in place, so nothing drifts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from termrl.training import ops
from termrl.training.config import LoraSettings


@dataclass(frozen=True)
class Site:
    """One linear layer inside a stack: its transformers name and the rows that are its own."""

    name: str
    start: int
    stop: int


class LoraStack:
    """Linear layers that share an input, as one weight, with the low-rank updates of those that are trained."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        biases: list[Tensor | None],
        lora: LoraSettings | None,
        generator: torch.Generator,
    ) -> None:
        self.sites = _sites(weights)
        self.base = torch.cat(list(weights.values()))
        self.bias = _stack_biases(list(weights.values()), biases)
        self.trained = [site for site in self.sites if lora and site.name.rsplit(".", 1)[-1] in lora.targets]
        self.spans = tuple((site.start, site.stop) for site in self.trained)
        self.rank, self.scaling = (lora.rank, lora.alpha / lora.rank) if lora else (0, 0.0)
        self.a: torch.nn.Parameter | None = None
        self.b: torch.nn.Parameter | None = None
        if self.trained:
            width = self.base.shape[1]
            # peft's start: A uniform (Kaiming, a = √5), B zero, so that the update starts at 0.
            bound = 1.0 / math.sqrt(width)
            a = torch.empty(len(self.trained) * self.rank, width).uniform_(-bound, bound, generator=generator)
            self.a = torch.nn.Parameter(a.to(self.base.dtype))
            self.b = torch.nn.Parameter(self.base.new_zeros(sum(stop - start for start, stop in self.spans), self.rank))
        self.effective = self.base

    def parameters(self) -> list[torch.nn.Parameter]:
        """A and B, if a layer is trained."""
        return [parameter for parameter in (self.a, self.b) if parameter is not None]

    def refresh(self) -> None:
        """Make the effective weight from the pristine base; tensors handed out before keep their values."""
        if not self.trained:
            return
        self.effective = torch.empty_like(self.base)
        for site in self.sites:
            rows = slice(site.start, site.stop)
            if site not in self.trained:
                self.effective[rows] = self.base[rows]
        with torch.no_grad():
            for site, a, b in self.updates():
                rows = slice(site.start, site.stop)
                torch.addmm(self.base[rows], b, a, alpha=self.scaling, out=self.effective[rows])

    def trained_weights(self) -> dict[str, Tensor]:
        """The effective weights of the trained layers, by transformers name; views."""
        return {site.name + ".weight": self.effective[site.start : site.stop] for site in self.trained}

    def updates(self) -> Iterator[tuple[Site, Tensor, Tensor]]:
        """(site, A [rank, in], B [out, rank]) of each trained layer; views, without gradient."""
        if self.a is not None and self.b is not None:
            yield from self._by_site(self.a.detach(), self.b.detach())

    def gradients(self) -> Iterator[tuple[Site, Tensor, Tensor]]:
        """(site, gradient of A, gradient of B) of each trained layer, after a backward pass."""
        if self.a is not None and self.b is not None and self.a.grad is not None and self.b.grad is not None:
            yield from self._by_site(self.a.grad, self.b.grad)

    def _by_site(self, a: Tensor, b: Tensor) -> Iterator[tuple[Site, Tensor, Tensor]]:
        row = 0
        for block, site in enumerate(self.trained):
            rows = site.stop - site.start
            yield site, a[block * self.rank : (block + 1) * self.rank], b[row : row + rows]
            row += rows

    def __call__(self, x: Tensor, *, pristine: bool = False) -> Tensor:
        if pristine:
            return torch.nn.functional.linear(x, self.base, self.bias)
        return ops.lora_linear(x, self.effective, self.bias, self.a, self.b, scaling=self.scaling, spans=self.spans)


class FullStack:
    """Linear layers that share an input, as one weight (and bias) that is trained itself."""

    def __init__(self, weights: dict[str, Tensor], biases: list[Tensor | None]) -> None:
        self.sites = _sites(weights)
        self.biased = [site for site, bias in zip(self.sites, biases, strict=True) if bias is not None]
        self.weight = torch.nn.Parameter(torch.cat(list(weights.values())))
        bias = _stack_biases(list(weights.values()), biases)
        self.bias = None if bias is None else torch.nn.Parameter(bias)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The weight, and the bias where there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def refresh(self) -> None:
        """Nothing to do: the weight is what is trained."""

    def trained_weights(self) -> dict[str, Tensor]:
        """Weights and biases, by transformers name; views."""
        return self._by_name(self.weight.detach(), None if self.bias is None else self.bias.detach())

    def gradients(self) -> dict[str, Tensor]:
        """Their gradients after a backward pass, by transformers name; views."""
        if self.weight.grad is None:
            return {}
        return self._by_name(self.weight.grad, None if self.bias is None else self.bias.grad)

    def _by_name(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        named = {f"{site.name}.weight": weight[site.start : site.stop] for site in self.sites}
        if bias is not None:
            named |= {f"{site.name}.bias": bias[site.start : site.stop] for site in self.biased}
        return named

    def __call__(self, x: Tensor, *, pristine: bool = False) -> Tensor:
        if pristine:
            raise ValueError("a full fine-tune has no base beside the trained weights")
        return ops.linear(x, self.weight, self.bias)


def _sites(weights: dict[str, Tensor]) -> list[Site]:
    sites: list[Site] = []
    row = 0
    for name, weight in weights.items():
        sites.append(Site(name, row, row + len(weight)))
        row += len(weight)
    return sites


def _stack_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    )
