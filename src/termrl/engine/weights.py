"""What the engine knows of a model: its shape from config.json, its tensors from safetensors, in fp32.

Llama, Qwen2 and Qwen3 decoders are one architecture with switches: biases are there when their tensors are, q/k norms
likewise, the head is tied when the config says so. q, k, v and gate, up are fused into one matrix each, and every
matrix is packed once for oneDNN, whose AVX-512 kernels run on every vendor's cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from termrl.engine.folder import read_json, weight_files
from termrl.errors import ModelError

SUPPORTED = ("llama", "qwen2", "qwen3")
_PACK_ROWS = 64  # the batch size that the packed layout is chosen for; others run on it as well


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. Sizes are elements, ``context`` is tokens."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    rope_theta: float
    tied: bool
    eos_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> DecoderConfig:
        """Read config.json (and generation_config.json for the end tokens).

        Raises:
            ModelError: names the file and the key that is missing or not supported.
        """
        path = folder / "config.json"
        raw = read_json(path)
        kind = raw.get("model_type")
        if kind not in SUPPORTED:
            raise ModelError(
                f"{path}: model_type {kind!r} is not supported by the embedded engine",
                hint=f"supported: {', '.join(SUPPORTED)}; serve other models with SGLang or vLLM",
            )
        _refuse(raw, path)
        rope = raw.get("rope_parameters") or {}
        try:
            heads = int(raw["num_attention_heads"])
            return cls(
                model_type=kind,
                vocab=int(raw["vocab_size"]),
                hidden=int(raw["hidden_size"]),
                intermediate=int(raw["intermediate_size"]),
                layers=int(raw["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or (128 if kind == "qwen3" else int(raw["hidden_size"]) // heads)),
                context=int(raw["max_position_embeddings"]),
                eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
                tied=bool(raw.get("tie_word_embeddings", False)),
                eos_ids=_eos_ids(folder, raw),
            )
        except KeyError as error:
            raise ModelError(f"{path}: {error.args[0]}: missing") from None
        except (TypeError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from None


def _refuse(raw: dict[str, Any], path: Path) -> None:
    """Refuse what would be computed wrongly if it were ignored."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    problems = {
        f"rope_type {rope_type!r}": rope_type != "default",
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") not in ("silu", "swish"),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "partial_rotary_factor": float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1,
        "quantization_config": bool(raw.get("quantization_config")),
    }
    for what, found in problems.items():
        if found:
            raise ModelError(f"{path}: {what} is not supported by the embedded engine")


def _eos_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.is_file() else None
    found = raw.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    return tuple(int(i) for i in found) if isinstance(found, list) else (int(found),)


class Linear:
    """``x @ weight.T + bias`` in fp32, packed for oneDNN where this torch has the operator.

    Once packed, the plain weight is let go (unless it is given as ``shared``, because something else reads it): one
    copy of the model in memory, not two.
    """

    def __init__(self, rows: int, columns: int, bias: Tensor | None = None, *, shared: Tensor | None = None) -> None:
        self.shape = (rows, columns)
        self.bias = bias
        self._shared = shared is not None
        self._plain = shared
        self._packed: Tensor | None = None
        self._given: list[tuple[int, int]] = []

    def fill(self, lo: int, hi: int, values: Tensor) -> None:
        """Set rows ``lo:hi``. In force once all rows were set, or :meth:`pack` was called."""
        if self._plain is None:
            self._plain = torch.empty(self.shape)
        self._plain[lo:hi].copy_(values)
        self._given.append((lo, hi))
        if sum(stop - start for start, stop in self._given) == self.shape[0]:
            self.pack()

    def pack(self) -> None:
        """Take up the rows that were set; the others keep their values."""
        if self._plain is None or not self._given:
            return
        if not self._shared and self._packed is not None:
            self._keep_the_others(self._plain, self._packed)
        self._given.clear()
        self._packed = _pack(self._plain)
        if self._packed is not None and not self._shared:
            self._plain = None

    def _keep_the_others(self, plain: Tensor, packed: Tensor) -> None:
        """Bring the rows that were not set back from the packed layout."""
        if sum(stop - start for start, stop in self._given) == self.shape[0]:
            return
        before = packed.to_dense()
        for start, stop in self._given:
            before[start:stop] = plain[start:stop]
        plain.copy_(before)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self._plain is not None
            return torch.nn.functional.linear(x, self._plain, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def _pack(weight: Tensor) -> Tensor | None:
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # a torch built without oneDNN: plain matrix products then


@dataclass
class Layer:
    """One decoder layer, q|k|v and gate|up fused."""

    norm1: Tensor
    norm2: Tensor
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass
class _Place:
    """Where a named tensor lives: rows ``lo:hi`` of a vector or table, or of a matrix."""

    home: Tensor | Linear
    lo: int
    hi: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.hi - self.lo, *tuple(self.home.shape)[1:])

    def fill(self, values: Tensor) -> None:
        if isinstance(self.home, Linear):
            self.home.fill(self.lo, self.hi, values)
        else:
            self.home[self.lo : self.hi].copy_(values)


@dataclass
class Weights:
    """All tensors of a decoder, addressable by transformers' parameter names through :meth:`update`."""

    config: DecoderConfig
    embedding: Tensor
    norm: Tensor
    head: Linear
    layers: list[Layer]
    _places: dict[str, _Place] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, config: DecoderConfig) -> Weights:
        """Read the safetensors files of ``folder``.

        Raises:
            ModelError: a tensor is missing, has the wrong shape, or is not part of this architecture.
        """
        from safetensors import SafetensorError, safe_open

        files = weight_files(folder)
        owner: dict[str, Any] = {}
        try:
            for file in files:
                handle = safe_open(file, framework="pt")
                owner |= dict.fromkeys(handle.keys(), handle)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{folder}: weights cannot be read: {error}") from None
        weights = cls._allocate(config, set(owner))
        given = {name: handle for name, handle in owner.items() if not name.endswith("rotary_emb.inv_freq")}
        if config.tied:
            given.pop("lm_head.weight", None)
        missing = sorted(set(weights._places) - set(given))
        if missing:
            raise ModelError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
        weights.update((name, handle.get_tensor(name)) for name, handle in given.items())
        return weights

    @classmethod
    def _allocate(cls, c: DecoderConfig, names: set[str]) -> Weights:
        places: dict[str, _Place] = {}
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

        def vector(name: str, size: int) -> Tensor:
            made = torch.empty(size)
            places[name] = _Place(made, 0, size)
            return made

        def linear(parts: dict[str, int], columns: int) -> Linear:
            rows = sum(parts.values())
            biased = {name for name in parts if f"{name}.bias" in names}
            made = Linear(rows, columns, torch.zeros(rows) if biased else None)
            lo = 0
            for name, size in parts.items():
                places[f"{name}.weight"] = _Place(made, lo, lo + size)
                if name in biased and made.bias is not None:
                    places[f"{name}.bias"] = _Place(made.bias, lo, lo + size)
                lo += size
            return made

        layers = []
        for i in range(c.layers):
            p = f"model.layers.{i}."
            a, m = p + "self_attn.", p + "mlp."
            normed = f"{a}q_norm.weight" in names
            layers.append(
                Layer(
                    norm1=vector(p + "input_layernorm.weight", c.hidden),
                    norm2=vector(p + "post_attention_layernorm.weight", c.hidden),
                    qkv=linear({a + "q_proj": q, a + "k_proj": kv, a + "v_proj": kv}, c.hidden),
                    out=linear({a + "o_proj": c.hidden}, q),
                    gate_up=linear({m + "gate_proj": c.intermediate, m + "up_proj": c.intermediate}, c.hidden),
                    down=linear({m + "down_proj": c.hidden}, c.intermediate),
                    q_norm=vector(a + "q_norm.weight", c.head_dim) if normed else None,
                    k_norm=vector(a + "k_norm.weight", c.head_dim) if normed else None,
                )
            )
        embedding = torch.empty(c.vocab, c.hidden)
        norm = vector("model.norm.weight", c.hidden)
        head = Linear(c.vocab, c.hidden, shared=embedding) if c.tied else linear({"lm_head": c.vocab}, c.hidden)
        places["model.embed_tokens.weight"] = _Place(head if c.tied else embedding, 0, c.vocab)
        return cls(c, embedding, norm, head, layers, places)

    def update(self, tensors: Mapping[str, Tensor] | Iterator[tuple[str, Tensor]]) -> None:
        """Copy tensors in by name and pack the matrices that changed. Others keep their values.

        Raises:
            ModelError: a name that the model does not have, or a wrong shape. Nothing may be assumed of the
                weights after it.
        """
        touched: dict[int, Linear] = {}
        for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
            place = self._places.get(name)
            if place is None:
                if name == "lm_head.weight" and self.config.tied:
                    continue
                raise ModelError(f"tensor {name} is not part of a {self.config.model_type} model")
            if place.shape != tuple(value.shape):
                raise ModelError(f"tensor {name} has shape {tuple(value.shape)}, not {place.shape}")
            place.fill(value.detach())
            if isinstance(place.home, Linear):
                touched[id(place.home)] = place.home
        for linear in touched.values():
            linear.pack()
