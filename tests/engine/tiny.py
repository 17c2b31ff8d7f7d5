"""Tiny random models of each supported kind, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = ("llama", "qwen2", "qwen3")
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tokenizer(folder: Path, *, template: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token a byte, after three special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", bos_token="<|im_start|>")
    if template:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _shape(changes: dict[str, Any], **own: Any) -> dict[str, Any]:
    return SHAPE | own | changes


def make_model(kind: str, **changes: Any) -> Any:
    """A random model; norms and biases are random too, so that none can be left out unseen."""
    torch.manual_seed(7)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_shape(changes, vocab_size=512, tie_word_embeddings=True)))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_shape(changes)))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_shape(changes, head_dim=16)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    return model.eval()
