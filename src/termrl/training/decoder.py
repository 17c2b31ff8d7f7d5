"""A Llama- or Qwen-kind decoder, run over prefix trees, of which a low-rank update or every weight is trained.

The weights come from a transformers model folder; layers that read the same input are stacked into one product (see
:mod:`termrl.training.stacks`).
"""

from __future__ import annotations

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
from termrl.training.stacks import FullStack, LoraStack

SUPPORTED = ("llama", "qwen2", "qwen3")

KeyValues = tuple[Tensor, Tensor]
Stack = LoraStack | FullStack


@dataclass
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Stack
    o: Stack
    gate_up: Stack
    down: Stack

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (self.qkv, self.o, self.gate_up, self.down)


class PackedDecoder:
    """The model. ``layers[i].stacks`` hold its matrices."""

    def __init__(
        self, model_dir: Path, lora: LoraSettings | None, *, full: bool, seed: int, dtype: torch.dtype
    ) -> None:
        """Load a model folder.

        Args:
            model_dir: a folder that transformers loads.
            lora: the low-rank update to train, or ``None``.
            full: train every weight in place of a low-rank update.
            seed: of the low-rank update's start.
            dtype: of weights and activations.

        Raises:
            ModelError: the folder cannot be loaded, or the model is not of a supported kind.
        """
        model = load_model(model_dir, dtype)
        config = model.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps: float = config.rms_norm_eps
        self.vocabulary: int = config.vocab_size
        self.dtype = dtype
        self.full = full
        self._rotary = model.model.rotary_emb
        self._vectors: dict[str, Tensor] = {}
        self._embedding = self._own("model.embed_tokens.weight", model.model.embed_tokens.weight)
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        self._head = self._embedding if tied else self._own("lm_head.weight", model.lm_head.weight)
        self._norm = self._own("model.norm.weight", model.model.norm.weight)
        generator = torch.Generator().manual_seed(seed)
        self.layers: list[_Layer] = []
        for index, layer in enumerate(model.model.layers):
            self.layers.append(self._layer(f"model.layers.{index}", layer, lora, generator))
            model.model.layers[index] = torch.nn.Identity()  # frees the layer: never two copies of the whole model

    def _own(self, name: str, weight: Tensor) -> Tensor:
        """A copy that is ours alone: the loaded tensor may keep the whole file mapped."""
        owned = weight.detach().clone()
        self._vectors[name] = torch.nn.Parameter(owned) if self.full else owned
        return self._vectors[name]

    def _layer(self, name: str, layer: Any, lora: LoraSettings | None, generator: torch.Generator) -> _Layer:
        def stack(parent: str, *children: str) -> Stack:
            modules = {f"{name}.{parent}.{child}": getattr(getattr(layer, parent), child) for child in children}
            weights = {key: module.weight.detach() for key, module in modules.items()}
            biases = [None if module.bias is None else module.bias.detach() for module in modules.values()]
            return FullStack(weights, biases) if self.full else LoraStack(weights, biases, lora, generator)

        def norm(key: str, module: Any) -> Tensor | None:
            return None if module is None else self._own(f"{name}.{key}.weight", module.weight)

        return _Layer(
            input_norm=self._own(f"{name}.input_layernorm.weight", layer.input_layernorm.weight),
            post_norm=self._own(f"{name}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight),
            q_norm=norm("self_attn.q_norm", getattr(layer.self_attn, "q_norm", None)),
            k_norm=norm("self_attn.k_norm", getattr(layer.self_attn, "k_norm", None)),
            qkv=stack("self_attn", "q_proj", "k_proj", "v_proj"),
            o=stack("self_attn", "o_proj"),
            gate_up=stack("mlp", "gate_proj", "up_proj"),
            down=stack("mlp", "down_proj"),
        )

    @property
    def stacks(self) -> Iterator[Stack]:
        """Every stack of every layer, in order."""
        for layer in self.layers:
            yield from layer.stacks

    @property
    def lora_stacks(self) -> Iterator[LoraStack]:
        """The same, of a decoder whose low-rank update is trained."""
        for stack in self.stacks:
            if isinstance(stack, LoraStack):
                yield stack

    def parameters(self) -> list[torch.nn.Parameter]:
        """Everything that is trained, in a fixed order."""
        vectors = [vector for vector in self._vectors.values() if isinstance(vector, torch.nn.Parameter)]
        return vectors + [parameter for stack in self.stacks for parameter in stack.parameters()]

    def refresh(self) -> None:
        """Make every effective weight anew from what is trained."""
        for stack in self.stacks:
            stack.refresh()

    def trained_weights(self) -> dict[str, Tensor]:
        """The present weights that training changes, by transformers name; views."""
        weights = {name: vector.detach() for name, vector in self._vectors.items() if self.full}
        for stack in self.stacks:
            weights |= stack.trained_weights()
        return weights

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of all weights, by transformers name, after a backward pass of a full fine-tune; views."""
        gradients = {name: vector.grad for name, vector in self._vectors.items() if vector.grad is not None}
        for stack in self.stacks:
            if isinstance(stack, FullStack):
                gradients |= stack.gradients()
        return gradients

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
            pristine: use the base model, without the low-rank update (only where one is trained).
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


def load_model(model_dir: Path, dtype: torch.dtype) -> Any:
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
