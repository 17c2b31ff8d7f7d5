"""A Llama- or Qwen-kind decoder with a low-rank update, run over prefix trees.

The weights come from a transformers model folder; layers that read the same input are stacked into one product. The
effective weight is the pristine base + scaling · B·A, made anew after each step: nothing is merged in place, so
nothing drifts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from termrl.errors import ModelError
from termrl.training import ops
from termrl.training.config import LoraSettings
from termrl.training.packing import Tile

SUPPORTED = ("llama", "qwen2", "qwen3")

KeyValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Site:
    """One linear layer inside a stack: its transformers name and the rows that are its own."""

    name: str
    start: int
    stop: int


class LoraStack:
    """Linear layers that share an input, as one weight, with the low-rank updates of those that are trained."""

    def __init__(
        self, weights: dict[str, Tensor], biases: list[Tensor | None], lora: LoraSettings, generator: torch.Generator
    ) -> None:
        self.sites: list[Site] = []
        row = 0
        for name, weight in weights.items():
            self.sites.append(Site(name, row, row + len(weight)))
            row += len(weight)
        self.base = torch.cat(list(weights.values()))
        self.bias = _stack_biases(list(weights.values()), biases)
        self.trained = [site for site in self.sites if site.name.rsplit(".", 1)[-1] in lora.targets]
        self.spans = tuple((site.start, site.stop) for site in self.trained)
        self.rank, self.scaling = lora.rank, lora.alpha / lora.rank
        self.a: torch.nn.Parameter | None = None
        self.b: torch.nn.Parameter | None = None
        if self.trained:
            width = self.base.shape[1]
            # peft's start: A uniform (Kaiming, a = √5), B zero, so that the update starts at 0.
            bound = 1.0 / math.sqrt(width)
            a = torch.empty(len(self.trained) * lora.rank, width).uniform_(-bound, bound, generator=generator)
            self.a = torch.nn.Parameter(a.to(self.base.dtype))
            self.b = torch.nn.Parameter(self.base.new_zeros(sum(stop - start for start, stop in self.spans), lora.rank))
        self.effective = self.base

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


@dataclass
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: LoraStack
    o: LoraStack
    gate_up: LoraStack
    down: LoraStack

    @property
    def stacks(self) -> tuple[LoraStack, ...]:
        return (self.qkv, self.o, self.gate_up, self.down)


class PackedDecoder:
    """The model. ``layers[i].stacks`` hold everything that is trained."""

    def __init__(self, model_dir: Path, lora: LoraSettings, *, seed: int, dtype: torch.dtype) -> None:
        """Load a model folder.

        Raises:
            ModelError: the folder cannot be loaded, or the model is not of a supported kind.
        """
        model = _load(model_dir, dtype)
        config = model.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps: float = config.rms_norm_eps
        self.vocabulary: int = config.vocab_size
        self.dtype = dtype
        self._rotary = model.model.rotary_emb
        self._embedding: Tensor = model.model.embed_tokens.weight.detach()
        self._head: Tensor = model.lm_head.weight.detach()
        self._norm: Tensor = model.model.norm.weight.detach()
        generator = torch.Generator().manual_seed(seed)
        self.layers = [
            _make_layer(f"model.layers.{index}", layer, lora, generator)
            for index, layer in enumerate(model.model.layers)
        ]

    @property
    def stacks(self) -> Iterator[LoraStack]:
        """Every stack of every layer, in order."""
        for layer in self.layers:
            yield from layer.stacks

    def parameters(self) -> list[torch.nn.Parameter]:
        """Everything that is trained, in a fixed order."""
        return [parameter for stack in self.stacks for parameter in (stack.a, stack.b) if parameter is not None]

    def refresh(self) -> None:
        """Make every effective weight anew from the base and the current A and B."""
        for stack in self.stacks:
            stack.refresh()

    def prefix(
        self, token_ids: Tensor, tiles: Sequence[ops.AttentionTile], *, pristine: bool = False
    ) -> list[KeyValues]:
        """Each layer's keys and values [kv heads, tokens, dim] of tokens that begin every sequence."""
        x = self._embedding.index_select(0, token_ids)
        cos, sin = self._angles(torch.arange(len(token_ids)))
        result: list[KeyValues] = []
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, cos, sin, pristine)
            result.append((k.transpose(0, 1), v.transpose(0, 1)))
            if index + 1 < len(self.layers):
                x = self._finish(layer, x, q, k, v, None, tiles, pristine)
        return result

    def logprobs(
        self,
        token_ids: Tensor,
        positions: Tensor,
        tiles: Sequence[ops.AttentionTile],
        prefix: Sequence[KeyValues] | None,
        rows: Tensor,
        row_temperature: Tensor,
        target_row: Tensor,
        target_token: Tensor,
        *,
        pristine: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy of each row, in nats; see :class:`packing.Pack` for the arguments.

        Args:
            prefix: from :meth:`prefix`, if there is a common prefix.
            pristine: use the base model, without the low-rank update.
        """
        x = self._embedding.index_select(0, token_ids)
        cos, sin = self._angles(positions)
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, cos, sin, pristine)
            x = self._finish(layer, x, q, k, v, None if prefix is None else prefix[index], tiles, pristine)
        hidden = ops.rms_norm(x.index_select(0, rows), self._norm, self.eps)
        return ops.target_logprobs(hidden, self._head, row_temperature, target_row, target_token)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(self._embedding, positions[None])
        half = self.head_dim // 2
        return cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous()

    def _qkv(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, pristine: bool) -> tuple[Tensor, Tensor, Tensor]:
        normed = ops.rms_norm(x, layer.input_norm, self.eps)
        projected = layer.qkv(normed, pristine=pristine).view(len(x), -1, self.head_dim)
        q, k, v = projected.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, self.eps), ops.rms_norm(k, layer.k_norm, self.eps)
        return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin), v

    def _finish(
        self,
        layer: _Layer,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: KeyValues | None,
        tiles: Sequence[ops.AttentionTile],
        pristine: bool,
    ) -> Tensor:
        attended = ops.tree_attention(q, k, v, prefix, tiles, scale=self.head_dim**-0.5)
        x = x + layer.o(attended, pristine=pristine)
        normed = ops.rms_norm(x, layer.post_norm, self.eps)
        return x + layer.down(ops.swiglu(layer.gate_up(normed, pristine=pristine)), pristine=pristine)


def attention_tiles(tiles: Sequence[Tile]) -> tuple[ops.AttentionTile, ...]:
    """A plan's tiles as tensors."""
    return tuple(
        ops.AttentionTile(tile.start, tile.stop, torch.from_numpy(tile.ancestors), torch.from_numpy(tile.hidden))
        for tile in tiles
    )


def _stack_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    )


def _make_layer(name: str, layer: Any, lora: LoraSettings, generator: torch.Generator) -> _Layer:
    def stack(parent: str, *children: str) -> LoraStack:
        modules = [getattr(getattr(layer, parent), child) for child in children]
        weights = {
            f"{name}.{parent}.{child}": module.weight.detach() for child, module in zip(children, modules, strict=True)
        }
        biases = [None if module.bias is None else module.bias.detach() for module in modules]
        return LoraStack(weights, biases, lora, generator)

    q_norm, k_norm = (getattr(layer.self_attn, which, None) for which in ("q_norm", "k_norm"))
    return _Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        qkv=stack("self_attn", "q_proj", "k_proj", "v_proj"),
        o=stack("self_attn", "o_proj"),
        gate_up=stack("mlp", "gate_proj", "up_proj"),
        down=stack("mlp", "down_proj"),
    )


def _load(model_dir: Path, dtype: torch.dtype) -> Any:
    """The transformers model, checked to be of a kind whose layers this module computes."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    if not (model_dir / "config.json").is_file():
        raise ModelError(f"{model_dir}: no config.json", hint="give a folder that transformers can load")
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model_dir}: config.json cannot be read: {error}") from error
    kind = config.model_type
    if kind not in SUPPORTED:
        raise ModelError(
            f"{model_dir}: models of kind {kind!r} cannot be trained here", hint=f"supported: {', '.join(SUPPORTED)}"
        )
    if getattr(config, "use_sliding_window", False):
        raise ModelError(f"{model_dir}: use_sliding_window = true is not supported")
    if getattr(config, "attention_dropout", 0.0):
        raise ModelError(f"{model_dir}: attention_dropout must be 0: it would make the ratio noise")
    if config.hidden_act != "silu":
        raise ModelError(f"{model_dir}: hidden_act = {config.hidden_act!r} is not supported", hint="supported: silu")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{model_dir}: the weights cannot be loaded: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
