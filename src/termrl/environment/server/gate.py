"""What stands between a WebSocket and openenv's endpoint: bad frames, vanished clients, and the causes of errors.

Work-round for openenv 0.10, whose endpoint (1) hears of a vanished client only when the running step is over, (2) ends
the session at a frame that is text but no JSON object, and (3) has no place in an error for its cause.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from termrl.environment.server.metrics import ServerMetrics
from termrl.environment.server.session import Session
from termrl.errors import CapacityError, TermrlError

WEBSOCKET = "/ws"
# What a client may send ahead of the answers; tbench2's wire has no use for more than one.
MAX_AHEAD = 64

_ERROR = '{"type":"error"'
_GOODBYE_S = 1.0
_MAX_TEXT = 500
_MAX_ERRORS = 20
_TOO_LARGE = 413
_LENGTH_REQUIRED = 411

_current: ContextVar[Connection | None] = ContextVar("connection", default=None)


def current_connection() -> Connection | None:
    """The WebSocket connection that this code runs for."""
    return _current.get()


class Gate:
    """ASGI middleware around openenv's app."""

    def __init__(self, app: ASGIApp, *, max_frame_bytes: int, metrics: ServerMetrics) -> None:
        self.app = app
        self.max_frame_bytes = max_frame_bytes
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request or connection."""
        if scope["type"] == "websocket":
            if scope["path"] != WEBSOCKET:
                await send({"type": "websocket.close", "code": 1008})
                return
            await Connection(self, scope, receive, send).run()
        elif scope["type"] == "http" and (status := self._refusal(scope)):
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> int | None:
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers:
            return _LENGTH_REQUIRED
        length = headers.get(b"content-length", b"0")
        return _TOO_LARGE if not length.isdigit() or int(length) > self.max_frame_bytes else None


class Connection:
    """One WebSocket: reads ahead of the endpoint, so that the client's end is seen in mid-step."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate = gate
        self._scope = scope
        self._receive = receive
        self._raw_send = send
        self._ahead: asyncio.Queue[Message] = asyncio.Queue()
        self._over = asyncio.Event()
        self._goodbye: tuple[int, str] | None = None
        self._session: Session | None = None

    def own(self, session: Session) -> None:
        """The session that lives as long as this connection."""
        self._session = session
        session.hang_up = lambda why: self.hang_up(1001, why)

    def hang_up(self, code: int, reason: str) -> None:
        """End the connection from this side, whatever it is doing."""
        self._goodbye = self._goodbye or (code, reason)
        self._over.set()

    async def run(self) -> None:
        """Until the client or the endpoint is done; the session has ended then, or is ending in the background."""
        _current.set(self)
        endpoint = asyncio.create_task(self._gate.app(self._scope, self._next, self._send))  # pyright: ignore[reportArgumentType]
        endpoint.add_done_callback(lambda task: self._over.set())
        reader = asyncio.create_task(self._read())
        try:
            await self._over.wait()
        finally:
            reader.cancel()
            endpoint.cancel()
            await asyncio.wait({reader, endpoint})
            # openenv's endpoint ends its session in a finally, which a second cancellation would break
            if self._session is not None:
                self._session.end()
        if self._goodbye is not None:
            code, reason = self._goodbye
            with contextlib.suppress(Exception):
                goodbye = {"type": "websocket.close", "code": code, "reason": reason[:100]}
                await asyncio.wait_for(self._raw_send(goodbye), _GOODBYE_S)
        if not endpoint.cancelled() and (error := endpoint.exception()) is not None:
            raise error

    async def _read(self) -> None:
        held = 0
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                if self._session is not None:
                    self._session.end()
                self._over.set()
                return
            held = held + _size(message) if self._ahead.qsize() else _size(message)
            if self._ahead.qsize() >= MAX_AHEAD or held > 2 * self._gate.max_frame_bytes:
                self.hang_up(1008, "too much was sent ahead of the answers")
                return
            self._ahead.put_nowait(message)

    async def _next(self) -> Message:
        """The next message that openenv's endpoint can take; others are answered here."""
        while True:
            message = await self._ahead.get()
            if message["type"] != "websocket.receive":
                return message
            problem, text = self._checked(message)
            if problem is None:
                return {"type": "websocket.receive", "text": text}
            code, why = problem
            await self._send(_text({"type": "error", "data": {"message": why, "code": code}}))

    def _checked(self, message: Message) -> tuple[tuple[str, str] | None, str]:
        text = message.get("text")
        if text is None:
            return ("INVALID_JSON", "a message is one text frame of JSON, not a binary one"), ""
        if len(text) > self._gate.max_frame_bytes:
            return ("VALIDATION_ERROR", f"a message may have {self._gate.max_frame_bytes} bytes"), ""
        try:
            # stricter than openenv's parser: no NaN, lone surrogates, endless nesting, or numbers of any length
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return ("INVALID_JSON", f"Invalid JSON: {error}"), ""
        if not isinstance(value, dict):
            return ("VALIDATION_ERROR", f"a message is a JSON object, not {type(value).__name__}"), ""
        return None, orjson.dumps(value).decode()

    async def _send(self, message: Message) -> None:
        text = message.get("text")
        if message["type"] == "websocket.close" and self._goodbye is not None:
            return  # the endpoint's own farewell; ours says why
        if message["type"] != "websocket.send" or text is None or not text.startswith(_ERROR):
            await self._raw_send(message)
            return
        frame = orjson.loads(text)
        data = frame["data"]
        failure = self._session.failure if self._session is not None else None
        if data["code"] == "EXECUTION_ERROR" and failure is not None:
            self._explain(data, failure)
        _shorten(data)
        self._gate.metrics.error(data["code"])
        await self._raw_send(_text(frame))
        if isinstance(failure, CapacityError):
            self.hang_up(1000, failure.message)

    def _explain(self, data: dict[str, Any], failure: TermrlError) -> None:
        """Say what tbench2's errors have no field for."""
        data["hint"] = failure.hint
        data["cause"] = getattr(failure, "cause", None)
        if isinstance(failure, CapacityError) and self._session is not None:
            admission = self._session.admission
            data |= {"code": "CAPACITY_REACHED", "active_sessions": admission.active}
            data["max_sessions"] = admission.max_sessions


def _shorten(data: dict[str, Any]) -> None:
    """openenv's errors give back all that was sent, which may be more than the client takes."""
    data["message"] = data["message"][:_MAX_TEXT]
    if "errors" in data:
        data["errors"] = data["errors"][:_MAX_ERRORS]
    for problem in data.get("errors", ()):
        if len(orjson.dumps(problem.get("input"))) > _MAX_TEXT:
            problem["input"] = "…"
        problem["loc"] = [part[:_MAX_TEXT] if isinstance(part, str) else part for part in problem["loc"]]


def _size(message: Message) -> int:
    return len(message.get("text") or message.get("bytes") or "")


def _text(frame: dict[str, Any]) -> Message:
    return {"type": "websocket.send", "text": orjson.dumps(frame).decode()}
