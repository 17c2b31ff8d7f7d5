"""Where an OpenEnv server is, and the token that opens it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from termrl.errors import ConfigError
from termrl.hosts import is_loopback

TOKEN_VARIABLE = "TERMRL_TOKEN"

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Address:
    """One server. ``socket`` is its WebSocket's URL, ``http`` the base of its HTTP routes (no slash at the end)."""

    socket: str
    http: str
    loopback: bool

    @classmethod
    def of(cls, url: str) -> Address:
        """Read ``http(s)://host[:port][/base]`` or ``ws(s)://…``, with or without ``/ws`` at the end.

        Raises:
            ConfigError: another scheme, no host, a bad port, or a user name or password in the URL.
        """
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"bad environment URL: {error}") from None
        scheme = _SCHEMES.get(parts.scheme.lower())
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "the environment URL holds a user name or a password, which would end up in logs",
                hint=f"put the token in a file (token_file) or in ${TOKEN_VARIABLE}",
            )
        if scheme is None or not parts.hostname:
            raise ConfigError(
                f"bad environment URL {url[:200]!r}", hint="http://HOST:PORT, https://HOST, ws://… or wss://…"
            )
        if parts.query or parts.fragment:
            raise ConfigError(f"the environment URL {parts.hostname} has a query or a fragment; only a path may follow")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        netloc = host if port is None else f"{host}:{port}"
        base = parts.path.rstrip("/").removesuffix("/ws").rstrip("/")
        web = "https" if scheme == "wss" else "http"
        return cls(
            socket=urlunsplit((scheme, netloc, f"{base}/ws", "", "")),
            http=urlunsplit((web, netloc, base, "", "")),
            loopback=is_loopback(parts.hostname),
        )


def read_token(file: Path | None) -> str | None:
    """The bearer token in ``file``, else in ``$TERMRL_TOKEN``, else ``None``.

    Raises:
        ConfigError: the file cannot be read, or holds no token of one line of printable ASCII.
    """
    found = find_token(file, os.environ)
    return None if found is None else found[0]


def find_token(file: Path | None, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A token as :func:`read_token` finds it, and where it was.

    Raises:
        ConfigError: as :func:`read_token`.
    """
    if file is None:
        token, source = environ.get(TOKEN_VARIABLE, "").strip(), f"${TOKEN_VARIABLE}"
        if not token:
            return None
    else:
        source = f"token_file: {file}"
        try:
            with file.open("rb") as opened:
                token = opened.read(_MAX_TOKEN_BYTES + 1).decode("utf-8", "replace").strip()
        except OSError as error:
            raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from None
    if not token or len(token) > _MAX_TOKEN_BYTES or not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(f"{source}: holds no bearer token (one line of printable ASCII)")
    return token, source
