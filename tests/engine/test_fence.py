"""Ending a turn at a closed command block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from termrl.engine.fence import FenceWatch
from termrl.engine.transformers import EmbeddedEngine
from tests.engine.test_generate import request

pytest.importorskip("termrl.agent.reply")


def encode(watch: FenceWatch, text: str) -> list[int]:
    return watch._tokenizer.encode(text).ids


def first_closed(watch: FenceWatch, text: str) -> str | None:
    """The shortest prefix, token by token, at which the watch tells that a block is closed."""
    tokens = encode(watch, text)
    for n in range(1, len(tokens) + 1):
        if watch.closed(tokens[:n]):
            return watch._tokenizer.decode(tokens[:n])
    return None


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("I go.\n```bash\nls -l\n```\nand on", "I go.\n```bash\nls -l\n```\n"),
        ("```python\nprint()\n```\n```bash\nls\n```\n", "```python\nprint()\n```\n```bash\nls\n```\n"),
        ("```bash\nls\n", None),
        ("no block at all\n", None),
        ("é `ls` ~ \n", None),
    ],
)
def test_the_turn_ends_with_the_newline_after_the_closing_fence(
    text: str, stop: str | None, folders: dict[str, Path]
) -> None:
    assert first_closed(FenceWatch.of(folders["llama"]), text) == stop


def test_a_fence_ends_the_row_with_its_own_reason(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free, watched = (request(n, (1, 70, 71, 72, 73), max_tokens=40, temperature=1.5, seed=3) for n in "ab")
    whole = EmbeddedEngine(folders["llama"], threads=1).generate([free])[0]
    monkeypatch.setattr(FenceWatch, "closed", lambda self, token_ids: len(token_ids) == 9)
    stop = replace(watched, sampling=replace(watched.sampling, stop_at_fence=True))
    plain, cut = EmbeddedEngine(folders["llama"], threads=1).generate([free, stop])
    assert plain.token_ids == whole.token_ids
    assert (cut.finish_reason, cut.token_ids) == ("fence", whole.token_ids[:9])
