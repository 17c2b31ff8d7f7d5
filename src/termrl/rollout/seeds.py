"""Seeds that depend on what is drawn, never on when: the same run draws the same numbers."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from blake2b over ``parts`` in order (numbers and text are told apart)."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"i{part}" if isinstance(part, int) else f"s{part}"
        digest.update(f"{len(text)}:{text}".encode())
    return int.from_bytes(digest.digest(), "big") >> 1
