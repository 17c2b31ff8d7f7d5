"""Stopping a turn once its reply holds one closed command block, by the reply parser's own scanner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any


class FenceWatch:
    """Tells when a reply's tokens hold a closed command block.

    The text is looked at only after a token that holds a newline, which is what completes a closing fence.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # byte-level vocabularies spell a newline Ċ, byte-fallback ones <0x0A>
        self._newlines = frozenset(
            i for token, i in tokenizer.get_vocab().items() if any(mark in token for mark in ("\n", "Ċ", "<0x0A>"))
        )

    @staticmethod
    @lru_cache(maxsize=4)
    def of(model_dir: Path) -> FenceWatch:
        """The watch over a model folder's tokenizer, made once."""
        from tokenizers import Tokenizer

        return FenceWatch(Tokenizer.from_file(str(model_dir / "tokenizer.json")))

    def closed(self, token_ids: Sequence[int]) -> bool:
        """Whether the reply, of which the last token is new, holds one closed command block."""
        if token_ids[-1] not in self._newlines:
            return False
        from termrl.agent.reply import has_closed_command

        return has_closed_command(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
