"""Nothing secret on a command line, in job metadata or in what is printed: only names and paths travel.

Ray keeps a job's command and variables, shows them in its dashboard and writes them to logs; miles logs all arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

MASK = "•••"

_SECRET_NAME = re.compile(r"(?:^|[_-])(?:api[_-]?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_PLAIN = frozenset({"input-key", "metadata-key", "label-key", "tool-key", "eval-input-key", "eval-label-key"})
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_SHORTEST = 6


def is_secret_name(name: str) -> bool:
    """Whether a variable or flag of this name holds a credential (rather than the path of one)."""
    bare = name.lstrip("-").lower()
    return bare not in _PLAIN and _SECRET_NAME.search(bare) is not None


def complaints(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """What of a command and its variables would give a secret away; never names the secret itself."""
    found = []
    for position, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        valued = bool(equals) or (position + 1 < len(argv) and not argv[position + 1].startswith("--"))
        if name.startswith("--") and valued and is_secret_name(name):
            found.append(f"{name}: a credential on the command line is shown by Ray and logged by miles")
        if _has_userinfo(word):
            found.append(f"{name if name.startswith('--') else 'an argument'}: a URL with a user name or a password")
    for name, value in env.items():
        if is_secret_name(name):
            found.append(f"{name}: variables of a job are kept in its metadata in plain text")
        elif _has_userinfo(value):
            found.append(f"{name}: a URL with a user name or a password")
    return found


def held_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of this shell that hold credentials."""
    return {name: value for name, value in sorted(environ.items()) if value and is_secret_name(name)}


def masked(text: str, secrets: Iterable[str]) -> str:
    """``text`` without any of ``secrets`` (those of a few letters are words, and stay)."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, MASK)
    return text


def _has_userinfo(text: str) -> bool:
    for url in _URL.findall(text):
        try:
            parts = urlsplit(url)
        except ValueError:
            continue
        if parts.username is not None or parts.password is not None:
            return True
    return False
