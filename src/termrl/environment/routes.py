"""The HTTP routes beside an OpenEnv server's WebSocket. No redirect is followed: the token is for one server only."""

from __future__ import annotations

import asyncio
import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from termrl.environment.address import Address
from termrl.errors import ConfigError, EnvironmentLostError

_MAX_BYTES = 64 * 1024 * 1024


async def get_json(address: Address, route: str, *, token: str | None = None, timeout_s: float = 30.0) -> Any:
    """What ``GET route`` answers, as JSON; ``None`` where the server has no such route (404, 405).

    Raises:
        EnvironmentLostError: nobody answers in time, or not with JSON, or with a failure of the server's.
        ConfigError: the server refuses the token, or wants one.
    """
    return await asyncio.to_thread(_get, address, route, token, timeout_s)


def _get(address: Address, route: str, token: str | None, timeout_s: float) -> Any:
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    # a proxy for a server on this machine is never meant
    proxies = [ProxyHandler({})] if address.loopback else []
    try:
        request = Request(address.http + route, headers=headers)
        with build_opener(_NoRedirect, *proxies).open(request, timeout=timeout_s) as response:
            status, body = response.status, response.read(_MAX_BYTES)
    except HTTPError as error:
        status, body = error.code, b""
        error.close()
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise EnvironmentLostError(f"{address.http}{route}: no answer: {why}") from None
    if status in (404, 405):
        return None
    if status in (401, 403):
        raise ConfigError(
            f"{address.http}{route}: the server {'refuses the token' if token else 'wants a bearer token'} ({status})",
            hint="--token-file FILE (probe), environment.token_file (train), or $TERMRL_TOKEN",
        )
    if status != 200:
        raise EnvironmentLostError(f"{address.http}{route}: HTTP {status}")
    try:
        return json.loads(body)
    except ValueError:
        raise EnvironmentLostError(f"{address.http}{route}: the answer is not JSON") from None


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
