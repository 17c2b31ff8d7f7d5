"""GGUF to a transformers folder, for Llama models with a GPT-2 style byte-level BPE tokenizer.

The tensors are dequantised with the ``gguf`` package in fp32 and stored so. Names and layout follow llama.cpp's
``convert_hf_to_gguf.py``, which permutes the rows of q and k for its rotary embedding; the permutation is undone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termrl.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PRE_TOKENIZERS = ("smollm",)
_CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL


def convert(source: Path, target: Path) -> dict[str, Any]:
    """Write the model in the GGUF file ``source`` as a transformers folder into the existing folder ``target``.

    Returns:
        ``weights_sha256`` and ``weights_bytes`` of the safetensors file.

    Raises:
        ModelError: not a GGUF file, or of a kind that is not supported.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source}: not a readable GGUF file: {error}") from None
    config = _config(reader, source)
    _write_tokenizer(reader, source, target)
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {key: config[key] for key in _SPECIAL_IDS})
    return _write_weights(reader, config, target / "model.safetensors")


_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _field(reader: GGUFReader, source: Path, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(f"{source}: GGUF key {key} is missing")
    return field.contents()


def _config(reader: GGUFReader, source: Path) -> dict[str, Any]:
    architecture = _field(reader, source, "general.architecture")
    if architecture != "llama":
        raise ModelError(f"{source}: GGUF architecture {architecture!r} is not supported", hint="only llama is")
    if any(key.startswith("llama.rope.scaling") for key in reader.fields):
        raise ModelError(f"{source}: rope scaling is not supported")

    def get(key: str) -> Any:
        return _field(reader, source, f"llama.{key}")

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    token = "tokenizer.ggml.{}_token_id".format
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(get("vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(get("feed_forward_length")),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv")),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(get("rope.freq_base")),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
        "bos_token_id": int(_field(reader, source, token("bos"))),
        "eos_token_id": int(_field(reader, source, token("eos"))),
        "pad_token_id": int(_field(reader, source, token("padding"))),
    }


def _write_weights(reader: GGUFReader, config: dict[str, Any], path: Path) -> dict[str, Any]:
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        name = _tensor_name(tensor.name)
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if name.endswith("q_proj.weight"):
            value = unpermute(value, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            value = unpermute(value, config["num_key_value_heads"])
        tensors[name] = np.ascontiguousarray(value)
    save_file(tensors, path, metadata={"format": "pt"})
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"weights_sha256": digest.hexdigest(), "weights_bytes": path.stat().st_size}


def _tensor_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_TENSORS:
        return f"{_TOP_TENSORS[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{suffix}"
    raise ModelError(f"GGUF tensor {name!r} is not supported")


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k: from interleaved rotary pairs back to transformers' halves.

    Args:
        weight: ``[heads * head_dim, hidden]``.
        heads: heads of this projection (for k: key-value heads).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(reader: GGUFReader, source: Path, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template from the GGUF's own vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = _field(reader, source, "tokenizer.ggml.model")
    pre = _field(reader, source, "tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(f"{source}: GGUF tokenizer {kind!r} with {pre!r} is not supported")
    tokens: list[str] = _field(reader, source, "tokenizer.ggml.tokens")
    merges = [tuple(line.split(" ")) for line in _field(reader, source, "tokenizer.ggml.merges")]
    types = _field(reader, source, "tokenizer.ggml.token_type")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))

    def token_of(key: str) -> str:
        return tokens[int(_field(reader, source, f"tokenizer.ggml.{key}_token_id"))]

    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token_of("bos"),
            "eos_token": token_of("eos"),
            "pad_token": token_of("padding"),
            "unk_token": token_of("unknown"),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(_field(reader, source, "llama.context_length")),
            "chat_template": _field(reader, source, "tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
