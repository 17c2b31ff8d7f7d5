"""Who may come in: a bearer token wherever others can reach the server, and no web page that is not ours."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from termrl.environment.address import TOKEN_VARIABLE, find_token
from termrl.environment.server.config import ServeConfig
from termrl.errors import ConfigError
from termrl.hosts import is_loopback

MIN_TOKEN_CHARS = 16
OPEN_PATH = "/health"

_MAKE = "openssl rand -hex 24"
_UNAUTHORIZED = 401
_FORBIDDEN = 403


def server_token(config: ServeConfig, environ: Mapping[str, str]) -> str | None:
    """The token that clients must send: from ``token_file``, else from ``$TERMRL_TOKEN``, else none.

    Raises:
        ConfigError: the file cannot be read, the token is no good, or there is none and the server is to listen where
            others can reach it.
    """
    found = find_token(config.token_file, environ)
    if found is None:
        if is_loopback(config.host):
            return None
        raise ConfigError(
            f"host: {config.host} can be reached by others, so a token is needed",
            hint=f"--token-file FILE or ${TOKEN_VARIABLE} ({_MAKE}), or --host 127.0.0.1",
        )
    token, source = found
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(f"{source}: a token has {MIN_TOKEN_CHARS} or more characters", hint=f"{_MAKE} makes one")
    return token


class Guard:
    """ASGI middleware in front of everything: only ``/health`` is open where there is a token.

    Without one (on loopback) a request must name a loopback host, so that no web page reaches the server through a
    name that it points here. An ``Origin`` is a browser's: it must be the server's own or an allowed one.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, host: str, origins: tuple[str, ...] = ()) -> None:
        self.app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._host = host
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request or connection."""
        if scope["type"] in ("http", "websocket") and (refusal := self._refusal(scope)):
            await _refuse(scope, send, *refusal)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin not in self._origins and urlsplit(origin).netloc != host:
            return _FORBIDDEN, "web pages of another origin may not connect; --allowed-origins names those that may"
        if scope["type"] == "http" and scope["path"] == OPEN_PATH:
            return None
        if self._expected is None:
            name = urlsplit(f"//{host}").hostname or ""
            if name != self._host and not is_loopback(name):
                return _FORBIDDEN, f"the host {name!r} is not this server's; one that others reach needs a token"
        elif not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return _UNAUTHORIZED, "a bearer token is needed: Authorization: Bearer …"
        return None


async def _refuse(scope: Scope, send: Send, status: int, why: str) -> None:
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    headers = [(b"content-type", b"application/json")]
    if status == _UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    body = orjson.dumps({"code": "UNAUTHORIZED" if status == _UNAUTHORIZED else "FORBIDDEN", "message": why})
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
