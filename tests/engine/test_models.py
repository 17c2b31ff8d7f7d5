"""Model folders: what is refused, by what name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from termrl.engine.bundled import ensure_model
from termrl.engine.folder import model_sha256
from termrl.engine.transformers import EmbeddedEngine
from termrl.errors import ModelError
from tests.engine.tiny import KINDS


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["llama"], tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_what_the_engine_cannot_compute_is_refused_by_name(changes: dict[str, Any], named: str, folder: Path) -> None:
    change(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=named) as error:
        EmbeddedEngine(folder)
    assert str(folder / "config.json") in error.value.message


def test_a_missing_key_a_missing_tensor_and_a_stranger_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        EmbeddedEngine(folder)
    save_file(weights | {"model.norm.weight": norm, "model.stranger": norm.clone()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.stranger"):
        EmbeddedEngine(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="hidden_size: missing"):
        EmbeddedEngine(folder)


def test_a_broken_weight_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ModelError, match="cannot be read"):
        EmbeddedEngine(folder)


def test_a_folder_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for use in (ensure_model, EmbeddedEngine):
        with pytest.raises(ModelError, match="no chat template") as error:
            use(folder)
        assert str(folder) in error.value.message


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_is_not_whole_is_refused(missing: str, folder: Path) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelError):
        ensure_model(folder)


def test_a_name_that_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        ensure_model(tmp_path / "nothing")


def test_sharded_weights_load_and_have_an_identity_of_their_own(folders: dict[str, Path], folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    identity = model_sha256(folder)
    assert identity == model_sha256(folders["llama"])
    names = sorted(whole)
    (folder / "model.safetensors").unlink()
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: whole[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert EmbeddedEngine(folder).config.layers == 3
    assert model_sha256(folder) != identity
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors: missing"):
        EmbeddedEngine(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_is_not_kept_twice(kind: str, folders: dict[str, Path]) -> None:
    weights = EmbeddedEngine(folders[kind], threads=1)._weights
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert all((matrix._plain is None) == (matrix._packed is not None) for matrix in matrices)
