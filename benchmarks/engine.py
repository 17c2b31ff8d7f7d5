"""The embedded engine against Hugging Face ``generate``: new tokens a second, prefill included.

8 first-steps tasks × 8 samples of the bundled model behind the first-steps opening, fp32, temperature 0.8, the same
number of new tokens in every row (no stop token for either). The peer runs in batches of 16, 32 and 64 and its best
rate counts; runs of ours and the peer's take turns. The engine starts each run with empty caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks._report import Figure, report  # noqa: E402

if TYPE_CHECKING:
    from termrl.engine.transformers import EmbeddedEngine

_SAMPLES = 8
_TEMPERATURE = 0.8
_BAR = 3.0


def prompts(tokenizer: Any) -> list[tuple[int, ...]]:
    """One prompt for each of 8 families."""
    from termrl.agent.prompts import first_messages, opening
    from termrl.tasks.generate.families import FAMILIES
    from termrl.tasks.generate.suite import instances

    made = []
    for family in [family for family in FAMILIES.values() if family.level == 1][:8]:
        instruction = next(iter(instances(family, "train", 1, 0))).instruction
        text = tokenizer.apply_chat_template(
            first_messages(opening("first-steps"), instruction), tokenize=False, add_generation_prompt=True
        )
        made.append(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return made


def ours(engine: EmbeddedEngine, ids: list[tuple[int, ...]], new_tokens: int) -> float:
    """New tokens a second of one batch of all prompts × samples."""
    from termrl.capture.upstreams import GenerateRequest, SamplingParams

    engine.set_weights({}, 0)  # forget all caches
    requests = [
        GenerateRequest(f"{i}-{j}", prompt, SamplingParams(_TEMPERATURE, max_tokens=new_tokens, seed=100 * i + j), i)
        for i, prompt in enumerate(ids)
        for j in range(_SAMPLES)
    ]
    begin = time.perf_counter()
    results = engine.generate(requests)
    seconds = time.perf_counter() - begin
    assert all(len(result.token_ids) == new_tokens for result in results)
    return len(requests) * new_tokens / seconds


def peer(model: Any, pad: int, ids: list[tuple[int, ...]], new_tokens: int, batch: int) -> float:
    """New tokens a second of one padded batch of ``batch`` rows, as many of each prompt as fit."""
    import torch

    rows = [prompt for prompt in ids for _ in range(batch // len(ids))]
    width = max(map(len, rows))
    padded = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    begin = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(
            padded, attention_mask=mask, do_sample=True, temperature=_TEMPERATURE, top_k=0, top_p=1.0,
            max_new_tokens=new_tokens, pad_token_id=pad,
        )  # fmt: skip
    seconds = time.perf_counter() - begin
    assert made.shape == (batch, width + new_tokens)
    return batch * new_tokens / seconds


def measure(lengths: list[int], batches: list[int], threads: int) -> list[Figure]:
    """Both engines at each number of new tokens; the peer's best batch is found at the first."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from termrl.engine.bundled import ensure_model
    from termrl.engine.transformers import EmbeddedEngine

    folder = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = prompts(tokenizer)
    engine = EmbeddedEngine(folder, threads=threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    torch.set_num_threads(threads)
    pad = int(tokenizer.pad_token_id)
    ours(engine, ids, 2)
    peer(model, pad, ids, 2, 8)
    figures = []
    for new_tokens in lengths:
        own, others = [ours(engine, ids, new_tokens)], {}
        for batch in batches:
            others[batch] = peer(model, pad, ids, new_tokens, batch)
            own.append(ours(engine, ids, new_tokens))
            rates = f"ours {own[-1]:.0f} tok/s, generate at batch {batch} {others[batch]:.0f} tok/s"
            print(f"{new_tokens} new tokens: {rates}", file=sys.stderr, flush=True)
        best = max(others, key=others.__getitem__)
        batches = [best]
        rate = statistics.median(own)
        ratio = rate / others[best]
        name = f"engine_tokens_per_s_{new_tokens}_new"
        bar = f"≥ {_BAR:g} × generate at batch {best}"
        figures.append(Figure(name, rate, "tok/s", bar, ratio >= _BAR, others[best], ratio))
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[24, 128])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    figures = measure(arguments.new_tokens, arguments.batches, arguments.threads)
    report("Embedded engine", figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
