"""A model folder in transformers' layout: what must be in it, and its identity."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from termrl.errors import ModelError

MANIFEST = "termrl.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        ModelError: the file is missing, unreadable or not an object; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: missing", hint="a model folder holds config.json, *.safetensors, a tokenizer"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by the index where there is one, sorted by name.

    Raises:
        ModelError: there is none, or one named by the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in read_json(index).get("weight_map", {}).values()})
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no .safetensors weights", hint="save the model with save_pretrained()")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: missing, but named by {index.name}")
    return files


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer brings a chat template, in any of the places transformers reads."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))


def check_folder(folder: Path) -> Path:
    """Check that a folder can serve as a policy: config, weights, tokenizer, chat template.

    Raises:
        ModelError: names the folder and what is missing.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    read_json(folder / "config.json")
    weight_files(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder}: no tokenizer.json", hint="save a fast tokenizer with save_pretrained()")
    if not has_chat_template(folder):
        raise ModelError(
            f"{folder}: the tokenizer has no chat template",
            hint="use an instruction-tuned model, or put its chat_template.jinja into the folder",
        )
    return folder


def model_sha256(folder: Path) -> str:
    """Sha256 over the weight files' bytes, in order of name: the identity an adapter's base is recorded under.

    A folder written by :mod:`termrl.engine.bundled` brings the figure in its manifest, which is taken if the
    weights still have the size it says.
    """
    files = weight_files(folder)
    if (folder / MANIFEST).is_file():
        manifest = read_json(folder / MANIFEST)
        if manifest.get("weights_bytes") == sum(file.stat().st_size for file in files):
            return str(manifest["weights_sha256"])
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
