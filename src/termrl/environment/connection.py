"""One WebSocket connection to an OpenEnv server: one request at a time, each with a deadline.

The protocol has no request ids, so an answer that comes after its deadline could be taken for the next one's: a
request that is given up, by its deadline or by its caller, closes the connection.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from termrl.environment.address import TOKEN_VARIABLE, Address
from termrl.environment.budgets import Budgets
from termrl.errors import (
    CapacityError,
    CommandError,
    ConfigError,
    DeadlineError,
    EnvironmentLostError,
    ProtocolError,
    ServerError,
)

MAX_REQUEST_BYTES = 16 * 1024 * 1024 - 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
CLOSE_S = 2.0

_CLOSED = "the environment server closed the connection"
_KNOWS_PROXIES = "proxy" in inspect.signature(connect.__init__).parameters

E = TypeVar("E", bound=EnvironmentLostError | CapacityError)


@dataclass(frozen=True)
class ClientOptions:
    """How a connection is made and kept. Times are seconds.

    Attributes:
        token: bearer token; read it with :func:`termrl.environment.address.read_token`.
        budgets: what calls may take before the server said anything; a reset's ``info`` raises them.
        connect_timeout_s: one attempt to connect.
        capacity_wait_s: how long the first call of a session waits, and asks again, for a free slot.
        ping_interval_s: keepalive pings; ``None``: off.
        ping_timeout_s: an unanswered ping ends the connection; ``None``: it does not (some tunnels drop pings).
        max_answer_bytes: the largest answer that is taken.
    """

    token: str | None = None
    budgets: Budgets = field(default_factory=Budgets)
    connect_timeout_s: float = 30.0
    capacity_wait_s: float = 0.0
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = None
    max_answer_bytes: int = MAX_ANSWER_BYTES


class Connection:
    """An open connection. Made by :meth:`open`; once :attr:`lost` is set it is of no more use."""

    def __init__(self, socket: ClientConnection) -> None:
        self.lost: EnvironmentLostError | CapacityError | None = None
        self.in_session = False
        self._socket = socket
        self._waiting: asyncio.Future[str | bytes] | None = None
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: Address, options: ClientOptions) -> Self:
        """Connect.

        Raises:
            EnvironmentLostError: nobody answers there, or not as an OpenEnv server.
            CapacityError: the server is too busy to let anyone in.
            ConfigError: the server refuses the token, or this client.
        """
        # a proxy for a server on this machine is never meant
        direct: dict[str, Any] = {"proxy": None} if address.loopback and _KNOWS_PROXIES else {}
        token = options.token
        try:
            socket = await _Connect(
                address.socket,
                additional_headers={"Authorization": f"Bearer {token}"} if token else None,
                open_timeout=options.connect_timeout_s,
                close_timeout=CLOSE_S,
                ping_interval=options.ping_interval_s,
                ping_timeout=options.ping_timeout_s,
                max_size=options.max_answer_bytes,
                compression=None,
                **direct,
            )
        except InvalidStatus as error:
            raise _refusal(address.http, error.response.status_code, with_token=token is not None) from None
        except (InvalidHandshake, ConnectionClosed, OSError, EOFError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise EnvironmentLostError(
                f"no environment server answers at {address.http}: {why}", hint="is it running, and is it OpenEnv?"
            ) from None
        return cls(socket)

    async def ask(self, message: dict[str, Any], expected: str, deadline_s: float) -> dict[str, Any]:
        """Send a message and await the ``data`` of the ``expected`` type of answer.

        Raises:
            ServerError: a coded error; the connection stays open.
            CapacityError: the server has no slot for this session, which has not begun.
            DeadlineError, ProtocolError, EnvironmentLostError: the connection is closed.
            CommandError: the message cannot be sent; the connection stays open.
        """
        if self.lost is not None:
            raise self.lost
        if self._waiting is not None:
            raise RuntimeError("a session takes one call at a time")
        try:
            text = json.dumps(message, allow_nan=False, ensure_ascii=False)
            size = len(text.encode())
        except ValueError as error:  # half a surrogate pair, too
            raise CommandError(f"it cannot be sent as JSON: {error}") from None
        if size > MAX_REQUEST_BYTES:
            raise CommandError(f"a message of {size} bytes is over the protocol's {MAX_REQUEST_BYTES}")
        waiting = self._waiting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await self._socket.send(text)
                frame = await waiting
        except TimeoutError:
            error = DeadlineError(f"the environment server did not answer {_name(message)} in {deadline_s:g} s")
            raise self._lose(error) from None
        except ConnectionClosed:
            # what it said before it closed is still to be read
            await asyncio.wait({self._reader}, timeout=CLOSE_S)
            if not waiting.done() or waiting.exception() is not None:
                raise self.lost or self._lose(EnvironmentLostError(_CLOSED)) from None
            frame = waiting.result()
        except asyncio.CancelledError:
            self._lose(EnvironmentLostError("a call into the environment server was given up"))
            raise
        finally:
            self._waiting = None
            if not waiting.cancel() and not waiting.cancelled():
                waiting.exception()
        return self._answer(frame, expected)

    async def close(self) -> None:
        """Say goodbye where that can be done, and close within seconds. Idempotent."""
        error = EnvironmentLostError("the client is closed")
        if self.lost is None and self._waiting is None:
            self.lost = error
            with suppress(ConnectionClosed, OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.send('{"type":"close"}')
        else:
            self._lose(error)
        await self._socket.close()
        await asyncio.wait({self._reader}, timeout=CLOSE_S)

    def broken(self, why: str) -> ProtocolError:
        """Close the connection because of what the server said; gives the error to raise."""
        return self._lose(ProtocolError(why, hint="is this URL a terminal environment's?"))

    async def _read(self) -> None:
        """Hand each frame to the call that waits for it. One that nobody asked for ends the connection."""
        try:
            while True:
                frame = await self._socket.recv()
                waiting, self._waiting = self._waiting, None
                if waiting is None or waiting.done():
                    self._lose(self._unasked(frame))
                    return
                waiting.set_result(frame)
        except ConnectionClosed as error:
            close = error.rcvd or error.sent
            said = f" ({close.code}{f' {close.reason}' if close.reason else ''})" if close else ""
            self._lose(EnvironmentLostError(_CLOSED + said))
        except Exception as error:
            self._lose(EnvironmentLostError(f"the connection to the environment server failed: {error}"))

    def _unasked(self, frame: str | bytes) -> EnvironmentLostError | CapacityError:
        """What a frame outside any call means: before the first call a server says so that it takes no session."""
        message = None if self.in_session else _decoded(frame)
        if message is not None and message[0] == "error":
            return _coded(message[1])
        return ProtocolError(f"the environment server sent what nobody asked for: {shown(frame)}")

    def _answer(self, frame: str | bytes, expected: str) -> dict[str, Any]:
        message = _decoded(frame)
        if message is None:
            raise self.broken(f"an answer is no message of the protocol: {shown(frame)}")
        kind, data = message
        if kind == "error":
            error = _coded(data)
            if isinstance(error, CapacityError):
                self._lose(error)
            else:
                self.in_session = True
            raise error
        if kind != expected:
            raise self.broken(f"the answer is of type {kind[:40]!r}, not {expected!r}")
        self.in_session = True
        return data

    def _lose(self, error: E) -> E:
        """Close the connection at once and for good."""
        if self.lost is None:
            self.lost = error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self._socket.transport.abort()
        return error


class _Connect(connect):
    """A connection that follows no redirect: the token is for the server that was named."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


def _decoded(frame: str | bytes) -> tuple[str, dict[str, Any]] | None:
    """Type and data of a message, ``None`` if it is none."""
    if isinstance(frame, bytes):
        return None
    try:
        message = json.loads(frame, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    kind, data = message.get("type"), message.get("data")
    return (kind, data) if isinstance(kind, str) and isinstance(data, dict) else None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _coded(data: dict[str, Any]) -> ServerError | CapacityError:
    code, said = str(data.get("code"))[:80], " ".join(str(data.get("message", "")).split())[:1000]
    if code == "CAPACITY_REACHED":
        active, most = data.get("active_sessions"), data.get("max_sessions")
        return CapacityError(f"the environment server has no free slot ({active} of {most} in use)")
    errors = data.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    if isinstance(first.get("loc"), list):
        said = f"{said}: {'.'.join(str(part) for part in first['loc'])}: {first.get('msg')}"[:1000]
    return ServerError(code, said, {name: value for name, value in data.items() if name not in ("code", "message")})


def shown(what: object) -> str:
    """The beginning of something that a server sent, for a message."""
    text = what if isinstance(what, str) else repr(what)
    return repr(text[:120])


def _name(message: dict[str, Any]) -> str:
    data = message.get("data")
    action = data.get("action_type") if isinstance(data, dict) else None
    return str(action or message["type"])


def _refusal(where: str, status: int, *, with_token: bool) -> ConfigError | CapacityError | EnvironmentLostError:
    if status == 401:
        return ConfigError(
            f"{where} refuses {'the token' if with_token else 'to serve without a token'} ({status})",
            hint=f"put the server's token in a file (token_file) or in ${TOKEN_VARIABLE}",
        )
    if status == 403:
        return ConfigError(
            f"{where} refuses this client, or has no OpenEnv endpoint ({status})",
            hint="give the URL under which /ws is, by a name that the server knows itself by",
        )
    if status in (429, 503):
        return CapacityError(f"{where} lets nobody in ({status})")
    return EnvironmentLostError(
        f"{where} has no OpenEnv endpoint (/ws answers {status})", hint="give the URL under which /ws is"
    )
