"""A model that is tiny, random and yet acts: its vocabulary holds whole commands, which it samples by chance.

It lets the entire loop run for real (session server, engine, sandboxes, tests, GRPO) within seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ("apple", "berry", "cedar", "delta")
COMMANDS = tuple(f"```bash\nmkdir {word}\n```\n" for word in WORDS)
COMPLETE = "TASK_COMPLETE"
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(folder: Path, *, acts: bool = True, seed: int = 0) -> Path:
    """A Llama of two layers in transformers form. ``acts=False``: it only ever writes plain words."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in specials])
    whole = ["hello ", "world ", *((*COMMANDS, COMPLETE) if acts else ())]
    raw.add_tokens([AddedToken(token, normalized=False) for token in whole])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = _TEMPLATE
    liked = [raw.token_to_id(token) for token in [*whole, "<|im_end|>"]]

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=raw.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=raw.token_to_id("<|im_start|>"),
        eos_token_id=raw.token_to_id("<|im_end|>"),
        pad_token_id=raw.token_to_id("<|endoftext|>"),
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # one direction of the residual stream is the same for every token and favours the tokens that act
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight.mul_(4.0)
        model.lm_head.weight[:, 0] = -2.0
        model.lm_head.weight[liked, 0] = 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_tasks(
    folder: Path,
    words: tuple[str, ...],
    *,
    family: str = "mkdir",
    prefix: str = "make",
    host: bool = True,
    test: str = "if [ -d /app/{word} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
) -> Path:
    """One Harbor task per word: make the directory of that name."""
    userland = 'termrl_userland = "host"\n' if host else ""
    for word in words:
        task = folder / f"{prefix}-{word}"
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "environment" / "README").write_text("nothing here\n")
        instruction = f"Make a directory named {word}."
        (task / "instruction.md").write_text(f"{instruction}\n")
        (task / "task.toml").write_text(
            'schema_version = "1.4"\n'
            f'[task]\nname = "tiny/{task.name}"\ndescription = {json.dumps(instruction)}\n'
            f'[metadata]\n{userland}family = "{family}"\n'
            '[environment]\ndocker_image = "debian:12-slim"\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
            "memory_mb = 128\nstorage_mb = 32\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n"
        )
        (task / "tests" / "test.sh").write_text(test.replace("{word}", word))
    return folder
