"""The chat client: any OpenAI-compatible endpoint as a :class:`~termrl.agent.types.Policy`."""

from __future__ import annotations

import importlib
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from termrl.agent.types import Message, Reply
from termrl.errors import ConfigError, PolicyError
from termrl.hosts import is_loopback

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SERVICE_HEADER = "x-termrl-service-s"
QUEUE_HEADER = "x-termrl-queue-s"

_CONTEXT_OVERFLOW = re.compile(
    r"context_length_exceeded|(?:maximum|model'?s|max(?:imum)?[_ ]) ?context (?:length|window)"
    r"|(?:exceeds?|longer than|larger than) the (?:model'?s )?(?:available |maximum )?context",
    re.IGNORECASE,
)
_HINTS = {
    401: "check the API key",
    403: "check the API key and its rights",
    404: "check the base URL (it usually ends in /v1) and the model's name",
    429: "the endpoint limits the rate: lower the concurrency",
}
_OPENAI_HOST = "api.openai.com"
_UNSAMPLED = frozenset({429, 503})
_NEVER_CONNECTED = (ConnectionRefusedError, socket.gaierror)


@asynccontextmanager
async def chat_client(
    base_url: str,
    api_key: str = "none",
    *,
    timeout_s: float = 1200.0,
    max_connections: int = 2048,
    follow_redirects: bool = True,
) -> AsyncIterator[AsyncOpenAI]:
    """One client for a process, closed on every path.

    It never retries: a retry that races its original corrupts a policy session. Proxies from the environment are
    not used for a loopback address.

    Args:
        base_url: the endpoint, usually ending in ``/v1``; policies may each point elsewhere.
        timeout_s: silence on one call after which it fails.
        max_connections: calls in flight; further ones wait.
        follow_redirects: whether a call, key and all, may be sent on to where the endpoint points.

    Raises:
        ConfigError: ``base_url`` is no http(s) URL, or carries a user or password.
    """
    check_url(base_url)
    from openai import AsyncOpenAI, DefaultAioHttpClient, Timeout

    # The SDK's HTTP library is httpx or its fork, by version; the limits must be of the same one.
    base = next(base for base in DefaultAioHttpClient.__mro__ if base.__name__ == "AsyncClient")
    http = importlib.import_module(base.__module__.partition(".")[0])
    limits = http.Limits(
        max_connections=max_connections,
        max_keepalive_connections=max_connections,
        # Servers on uvicorn drop an idle connection after 5 s, and a POST sent into that moment is lost.
        keepalive_expiry=2.0,
    )
    client = AsyncOpenAI(
        base_url=base_url,
        api_key=api_key or "none",
        max_retries=0,
        timeout=Timeout(timeout_s, connect=30.0, pool=None),
        http_client=DefaultAioHttpClient(
            limits=limits, trust_env=not on_this_machine(base_url), follow_redirects=follow_redirects
        ),
    )
    if urlsplit(base_url).hostname != _OPENAI_HOST:
        # the SDK takes them from the environment and sends them to whomever it talks to
        client.organization = client.project = None
    try:
        yield client
    finally:
        await client.close()


class ChatPolicy:
    """A policy behind a chat-completions endpoint; one per episode.

    The assistant message of a :class:`~termrl.agent.types.Reply` is the endpoint's own, with its nulls left out, so
    that it can be sent back verbatim.

    Args:
        client: from :func:`chat_client`; shared, not closed here.
        model: the ``model`` field of every request.
        temperature, top_p: left to the endpoint when ``None``.
        base_url: where this policy's session lives, when not at the client's own URL.
        extra_body: further fields of every request.
        max_tokens_field: what the endpoint calls the limit of new tokens.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        *,
        model: str,
        temperature: float | None = None,
        top_p: float | None = None,
        base_url: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
    ) -> None:
        if base_url is not None:
            check_url(base_url)
            client = client.with_options(base_url=base_url)
        self._client = client
        self._where = redacted(str(client.base_url))
        self._fixed: dict[str, Any] = {"model": model}
        if temperature is not None:
            self._fixed["temperature"] = temperature
        if top_p is not None:
            self._fixed["top_p"] = top_p
        if extra_body:
            self._fixed["extra_body"] = dict(extra_body)
        self._max_tokens_field = max_tokens_field

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        """Ask for one turn.

        The finish reason is the endpoint's own, but for ``context``: also a prompt that is refused for its length,
        and a turn cut short because the session server clamped it to the window.

        Raises:
            PolicyError: connection, timeout, error status, or a reply that is no chat completion; it says whether
                the endpoint surely sampled nothing.
        """
        from openai import APIConnectionError, APIStatusError, OpenAIError

        request: dict[str, Any] = {**self._fixed, self._max_tokens_field: max_tokens, "messages": messages}
        if seed is not None:
            request["seed"] = seed
        start = time.monotonic()
        try:
            raw = await self._client.chat.completions.with_raw_response.create(**request)
            content = raw.content
        except APIConnectionError as error:
            # The SDK's aiohttp transport calls a refused connection a timeout: only the root says which it was.
            root = _root(error)
            if isinstance(root, TimeoutError):
                waited = time.monotonic() - start
                raise PolicyError(f"{self._where}: no answer within {waited:.1f} s") from error
            reason = " ".join(str(root).split()) or type(root).__name__
            unsampled = isinstance(root, _NEVER_CONNECTED)
            raise PolicyError(f"{self._where}: {reason}", hint="is the endpoint up?", unsampled=unsampled) from error
        except APIStatusError as error:
            return self._refused(error.status_code, error.response.text, error.response.headers)
        except (OpenAIError, OSError, ValueError) as error:
            raise PolicyError(f"{self._where}: {type(error).__name__}: {error}") from error
        return self._reply(content, raw.headers, time.monotonic() - start, max_tokens)

    def _refused(self, status: int, body: str, headers: Mapping[str, str]) -> Reply:
        message = _error_message(body)
        if status in (400, 413, 422) and _CONTEXT_OVERFLOW.search(body):
            return Reply({"role": "assistant", "content": ""}, "", "context")
        raise PolicyError(
            f"{self._where}: HTTP {status}: {message}",
            hint=_HINTS.get(status),
            status=status,
            unsampled=status in _UNSAMPLED,
            retry_after_s=retry_after(headers.get("retry-after")),
        )

    def _reply(self, content: bytes, headers: Mapping[str, str], wall_s: float, max_tokens: int) -> Reply:
        body = self._json(content)
        choices = body.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            detail = f": {_error_message(content.decode('utf-8', 'replace'))}" if "error" in body else ""
            raise PolicyError(f"{self._where}: the reply has no choices{detail}")
        choice = choices[0]
        message = _without_nulls(choice.get("message"))
        if not isinstance(message, dict) or not message:
            raise PolicyError(f"{self._where}: the reply's message is null")
        finish_reason = choice.get("finish_reason")
        if not isinstance(finish_reason, str):
            raise PolicyError(f"{self._where}: the reply has no finish_reason, so nobody knows whether it is whole")
        message.setdefault("role", "assistant")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        usage = body.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        extra = body.get("termrl")
        extra = extra if isinstance(extra, dict) else {}
        if finish_reason == "length" and (_count(extra.get("max_tokens")) or max_tokens) < max_tokens:
            finish_reason = "context"
        service_s, queue_s = _times(headers, extra, wall_s)
        return Reply(
            message=message,
            content=_text(message.get("content")),
            finish_reason=finish_reason,
            reasoning=reasoning if isinstance(reasoning, str) else None,
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            service_s=service_s,
            queue_s=queue_s,
        )

    def _json(self, content: bytes) -> dict[str, Any]:
        import orjson

        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            start = content[:80].decode("utf-8", "replace")
            raise PolicyError(f"{self._where}: the reply is not JSON: {start!r}") from error
        if not isinstance(body, dict):
            raise PolicyError(f"{self._where}: the reply is not a JSON object")
        return body


def redacted(url: str) -> str:
    """``url`` without user, password, query or fragment, for messages and records."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")).rstrip("/")


def retry_after(value: str | None) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, given as seconds or as a date; ``None`` for anything else."""
    seconds = _seconds(value)
    if seconds is None and value:
        try:
            seconds = max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    return seconds


def check_url(url: str) -> None:
    """Return if ``url`` can be an endpoint's.

    Raises:
        ConfigError: no http(s) URL, or one with a user or password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base_url: {redacted(url)!r} is not an http(s) URL", hint="such as http://127.0.0.1:8000/v1")
    if "@" in parts.netloc:
        raise ConfigError(
            f"base_url: {redacted(url)} carries a user or password",
            hint="leave it out of the URL and give the secret as the API key",
        )


def on_this_machine(url: str) -> bool:
    """Whether an endpoint is on this machine, as its URL has it."""
    return is_loopback(urlsplit(url).hostname or "")


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _error_message(body: str) -> str:
    """The one line that says what went wrong in an OpenAI-shaped (or any) error body."""
    import orjson

    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = body
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return " ".join(str(value).split())[:300] or "empty body"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _text(content: object) -> str:
    """A message's text, given as a string or as content parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds(value: object) -> float | None:
    if not isinstance(value, str | int | float):
        return None
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _times(headers: Mapping[str, str], extra: Mapping[str, Any], wall_s: float) -> tuple[float, float]:
    """Engine service and queue seconds: as the server tells them, else all is service."""
    service = _seconds(headers.get(SERVICE_HEADER, extra.get("service_s")))
    if service is None:
        return wall_s, 0.0
    service = min(service, wall_s)
    queue = _seconds(headers.get(QUEUE_HEADER, extra.get("queue_s")))
    return service, wall_s - service if queue is None else queue
