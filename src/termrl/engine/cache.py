"""Keys and values kept between turns, bounded: sessions' own tokens and the prefixes they share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from termrl.engine.decoder import Prefix


@dataclass(eq=False)
class CachedSession:
    """What is known of one session: all token ids (prefix included), and own keys and values.

    ``k`` and ``v`` are ``[layers, kv_heads, own tokens, head_dim]``, for the tokens after the prefix.
    """

    token_ids: list[int]
    prefix: Prefix | None
    k: Tensor
    v: Tensor

    @property
    def own(self) -> int:
        """Tokens held by this session alone."""
        return self.k.shape[2]


class KVCache:
    """Least recently used sessions and prefixes go first once more than ``max_tokens`` tokens are held."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._sessions: OrderedDict[str, CachedSession] = OrderedDict()
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    def session(self, session_id: str) -> CachedSession | None:
        """A session, marked as used."""
        found = self._sessions.get(session_id)
        if found is not None:
            self._sessions.move_to_end(session_id)
        return found

    def prefix(self, token_ids: tuple[int, ...]) -> Prefix | None:
        """The prefix of exactly these tokens, marked as used."""
        found = self._prefixes.get(token_ids)
        if found is not None:
            self._prefixes.move_to_end(token_ids)
        return found

    def longest_prefix(self, token_ids: Sequence[int]) -> Prefix | None:
        """The longest prefix that ``token_ids`` begins with and goes beyond."""
        fitting = [
            known for known in self._prefixes if len(known) < len(token_ids) and tuple(token_ids[: len(known)]) == known
        ]
        return self.prefix(max(fitting, key=len)) if fitting else None

    def add_prefix(self, prefix: Prefix) -> None:
        """Keep a prefix."""
        self._prefixes[prefix.token_ids] = prefix
        self._evict()

    def add_session(self, session_id: str, session: CachedSession) -> None:
        """Keep a session in place of what was known of it."""
        self._sessions.pop(session_id, None)
        self._sessions[session_id] = session
        self._evict()

    def release(self, session_id: str) -> None:
        """Forget a session."""
        self._sessions.pop(session_id, None)

    def clear(self) -> None:
        """Forget everything."""
        self._sessions.clear()
        self._prefixes.clear()

    @property
    def sessions(self) -> int:
        """How many sessions are held."""
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        """Tokens held, a prefix counted once however many sessions begin with it."""
        prefixes = {id(p): len(p) for p in self._prefixes.values()}
        prefixes |= {id(s.prefix): len(s.prefix) for s in self._sessions.values() if s.prefix is not None}
        return sum(prefixes.values()) + sum(s.own for s in self._sessions.values())

    def _evict(self) -> None:
        while self._sessions and self.tokens > self.max_tokens:
            self._sessions.popitem(last=False)
        while self._prefixes and self.tokens > self.max_tokens:
            self._prefixes.popitem(last=False)
