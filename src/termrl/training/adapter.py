"""Low-rank updates on disk, in peft's format, and full models with the update merged in."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termrl.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."

_README = """\
---
base_model: {base}
library_name: peft
tags: [lora, reinforcement-learning, terminal]
---

# LoRA adapter for {base}

Trained by reinforcement learning on terminal tasks with termrl. Rank {rank}, alpha {alpha:g}, on {targets}.

The adapter belongs to the exact base weights with sha256

    {sha256}

(the digest of the base's safetensors file). On other weights of the same name, such as those before quantisation, it
gives other results. `termrl export --merged` writes a model that stands alone.
"""


@dataclass(frozen=True)
class AdapterInfo:
    """What an adapter's folder says about it.

    Attributes:
        base: the base model's name.
        sha256: of the base's weights; see :func:`base_sha256`.
        rank, alpha: the weight is base + (alpha / rank) · B·A.
        targets: names of the trained layers.
    """

    base: str
    sha256: str
    rank: int
    alpha: float
    targets: tuple[str, ...]


def base_sha256(model_dir: Path) -> str:
    """sha256 of a model's weights: of its safetensors file or, for several, of what ``sha256sum`` prints of them.

    Raises:
        ModelError: the folder has no safetensors file.
    """
    digests: list[tuple[str, str]] = []
    for path in _weight_files(model_dir):
        with path.open("rb") as file:
            digests.append((hashlib.file_digest(file, "sha256").hexdigest(), path.name))
    if len(digests) == 1:
        return digests[0][0]
    return hashlib.sha256("".join(f"{digest}  {name}\n" for digest, name in digests).encode()).hexdigest()


def write_adapter(path: Path, info: AdapterInfo, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads. ``weights`` are under peft's names."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": info.base,
        "r": info.rank,
        "lora_alpha": info.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(info.targets),
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    metadata = {"format": "pt", "base_model": info.base, "base_sha256": info.sha256}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / WEIGHTS, metadata=metadata)
    targets = ", ".join(sorted(info.targets))
    text = _README.format(base=info.base, sha256=info.sha256, rank=info.rank, alpha=info.alpha, targets=targets)
    (path / "README.md").write_text(text)


def read_adapter(path: Path) -> tuple[AdapterInfo, dict[str, Tensor]]:
    """Read what :func:`write_adapter` wrote.

    Raises:
        ModelError: a file is missing or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((path / CONFIG).read_text())
        with safe_open(path / WEIGHTS, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        info = AdapterInfo(
            base=config["base_model_name_or_path"],
            sha256=metadata.get("base_sha256", ""),
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=tuple(config["target_modules"]),
        )
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: not a LoRA adapter: {error}", hint="give a checkpoint's adapter folder") from error
    return info, weights


def merged_weights(model_dir: Path, adapter: Path) -> dict[str, Tensor]:
    """The weights that the adapter changes, float32, by their transformers names; the others are the base's.

    Raises:
        ModelError: the adapter is of other base weights, or a file is missing.
    """
    from safetensors import safe_open

    merge = _Merge(model_dir, adapter)
    merged: dict[str, Tensor] = {}
    for path in _weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if merge.changes(name):
                    merged[name] = merge(name, _float32(file.get_tensor(name)))
    merge.finish()
    return merged


def export_merged(model_dir: Path, adapter: Path, out: Path) -> None:
    """Write base + (alpha / rank) · B·A as a float32 model folder with its tokenizer, loadable by transformers.

    The folder appears whole or not at all.

    Args:
        model_dir: the base that the adapter was trained on.
        adapter: a folder in peft's format.
        out: the folder to make; must not exist.

    Raises:
        ModelError: the adapter is of other base weights, a file is missing, or ``out`` exists.
    """
    from termrl.training.checkpoints import atomic_folder

    if out.exists():
        raise ModelError(f"{out}: exists already", hint="give a folder that does not exist")
    merge = _Merge(model_dir, adapter)
    with atomic_folder(out) as folder:
        _write_weights(model_dir, folder, merge)
        merge.finish()
        _copy_companions(model_dir, folder)


class _Merge:
    """base + (alpha / rank) · B·A, tensor by tensor.

    Raises:
        ModelError: the adapter is of other base weights, or is none.
    """

    def __init__(self, model_dir: Path, adapter: Path) -> None:
        info, self._updates = read_adapter(adapter)
        if info.sha256 and info.sha256 != base_sha256(model_dir):
            raise ModelError(
                f"{adapter}: was trained on other base weights than those in {model_dir}",
                hint=f"its base is {info.base}",
            )
        self._model_dir = model_dir
        self._scaling = info.alpha / info.rank

    def changes(self, name: str) -> bool:
        """Whether the adapter has an update for the weight of this name."""
        return f"{_layer(name)}.lora_A.weight" in self._updates

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """The merged weight; each may be asked for once."""
        import torch

        layer = _layer(name)
        a, b = self._updates.pop(f"{layer}.lora_A.weight", None), self._updates.pop(f"{layer}.lora_B.weight", None)
        if a is None or b is None:
            return weight
        return torch.addmm(weight, b.to(torch.float32), a.to(torch.float32), alpha=self._scaling)

    def finish(self) -> None:
        """Refuse an adapter that has updates which no weight asked for."""
        if self._updates:
            first = sorted(self._updates)[0]
            raise ModelError(f"the adapter trains layers that {self._model_dir} does not have: {first}")


def _layer(name: str) -> str:
    return _PREFIX + name.removesuffix(".weight")


def _float32(tensor: Tensor) -> Tensor:
    import torch

    return tensor.to(torch.float32)


def write_model(path: Path, model_dir: Path, weights: Mapping[str, Tensor]) -> None:
    """Write ``model_dir``'s model with ``weights`` (by transformers name) in place of its own, and its tokenizer."""
    import torch

    path.mkdir(parents=True, exist_ok=True)
    _write_weights(model_dir, path, lambda name, weight: weights.get(name, weight).detach().to(torch.float32))
    _copy_companions(model_dir, path)


def _write_weights(model_dir: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Write one float32 safetensors file with what ``change`` makes of each of the model's tensors."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    written: dict[str, Tensor] = {}
    for path in _weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                written[name] = change(name, file.get_tensor(name).to(torch.float32)).contiguous()
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})


def _copy_companions(model_dir: Path, folder: Path) -> None:
    """Everything beside the weights: config (as float32), tokenizer, chat template."""
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(model_dir.iterdir()):
        weights = path.suffix in {".safetensors", ".bin", ".gguf"} or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)


def _weight_files(model_dir: Path) -> list[Path]:
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{model_dir}: no safetensors file", hint="give a folder that transformers can load")
    return paths
