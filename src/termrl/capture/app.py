"""The session server's application: OpenAI chat completions in front of an engine, with every token on record.

Routes: ``POST /sessions``, ``POST /sessions/{id}/v1/chat/completions``, ``GET`` and ``DELETE /sessions/{id}``,
``GET /sessions/{id}/v1/models``, ``GET /v1/models``, ``GET /health``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from termrl.capture.chat import (
    ApiError,
    ChatRequest,
    SamplingDefaults,
    SessionRequest,
    as_stream,
    assistant_message,
    completion,
    validated,
)
from termrl.capture.ledger import Counters, HistoryError, Ledger, OnDivergence
from termrl.capture.render import Renderer
from termrl.capture.segments import Segment
from termrl.capture.upstreams import GenerateRequest, GenerateResult, SamplingParams, Upstream, check_result
from termrl.errors import CaptureError, PolicyError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class PolicySession:
    """One session: its ledger, its defaults, and the generations in flight."""

    session_id: str
    order: int
    defaults: SamplingDefaults
    ledger: Ledger
    running: set[asyncio.Task[GenerateResult]] = field(default_factory=set)
    deleted: bool = False


class SessionServer:
    """The sessions and the Starlette ``app`` over them. Lives in one event loop, with its upstream."""

    def __init__(
        self,
        upstream: Upstream,
        renderer: Renderer,
        *,
        on_divergence: OnDivergence = "branch",
        timeout_s: float = 3600.0,
        max_sessions: int = 20_000,
        max_body_bytes: int = 64 * 2**20,
    ) -> None:
        """Build the server; :func:`termrl.capture.server.serve` runs it.

        Args:
            upstream: the engine.
            renderer: the model's renderer.
            on_divergence: what a history rewritten more than one turn back does: ``branch``, or ``reject`` (400).
            timeout_s: bound on one generation, its wait for the engine included.
            max_sessions: live sessions; one more is refused with 503.
            max_body_bytes: size of a request; a larger one is refused with 413.
        """
        self.upstream = upstream
        self.renderer = renderer
        self.url = ""
        self._on_divergence: OnDivergence = on_divergence
        self._timeout_s = timeout_s
        self._max_sessions = max_sessions
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[str, PolicySession] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._closing = False
        self.app = Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/sessions", self._create, methods=["POST"]),
                Route("/sessions/{session_id}", self._get, methods=["GET"]),
                Route("/sessions/{session_id}", self._delete, methods=["DELETE"]),
                Route("/sessions/{session_id}/v1/models", self._models, methods=["GET"]),
                Route("/sessions/{session_id}/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _on_api_error,
                HTTPException: _on_http_error,
                ClientDisconnect: _on_disconnect,
                Exception: _on_crash,
            },
        )

    def create_session(self, *, order: int = 0, sampling: SamplingDefaults | None = None) -> str:
        """Open a session and return its id, as ``POST /sessions`` does.

        Raises:
            ApiError: 503, too many live sessions.
        """
        if self._closing or len(self._sessions) >= self._max_sessions:
            why = "the server is shutting down" if self._closing else f"{self._max_sessions} sessions are live already"
            raise ApiError(503, why, code="capacity", hint="delete sessions that have ended")
        session_id = uuid.uuid4().hex
        ledger = Ledger(session_id, self.renderer, on_divergence=self._on_divergence)
        self._sessions[session_id] = PolicySession(session_id, order, sampling or SamplingDefaults(), ledger)
        return session_id

    def segments(self, session_id: str) -> tuple[Segment, ...]:
        """What a trainer gets from a session; empty before its first turn.

        Raises:
            ApiError: 404, no such session.
        """
        return self._session(session_id).ledger.segments()

    def counters(self, session_id: str) -> Counters:
        """The fidelity of a session.

        Raises:
            ApiError: 404, no such session.
        """
        return self._session(session_id).ledger.counters()

    def delete_session(self, session_id: str) -> None:
        """Forget a session, as ``DELETE`` does. A generation in flight ends as it would, and is not recorded.

        Raises:
            ApiError: 404, no such session.
        """
        session = self._session(session_id)
        session.deleted = True
        del self._sessions[session_id]
        self._release_when_idle(session)

    async def settle(self) -> None:
        """Return when the engine has forgotten every deleted session."""
        while self._releases:
            await asyncio.wait(set(self._releases))

    async def aclose(self) -> None:
        """Cancel every generation in flight, refuse new sessions and forget the others. Idempotent."""
        self._closing = True
        for session in list(self._sessions.values()):
            for task in list(session.running):
                task.cancel()
            self.delete_session(session.session_id)
        await self.settle()

    def _session(self, session_id: str) -> PolicySession:
        session = self._sessions.get(session_id)
        if session is None:
            raise ApiError(404, f"no session {session_id!r}", code="session_not_found")
        return session

    def _release_when_idle(self, session: PolicySession) -> None:
        async def release() -> None:
            if session.running:
                await asyncio.wait(set(session.running))
            with contextlib.suppress(CaptureError, PolicyError):
                await self.upstream.release(session.session_id)

        task = asyncio.create_task(release())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok", "model": self.upstream.model_name, "sessions": len(self._sessions)})

    async def _models(self, request: Request) -> Response:
        if "session_id" in request.path_params:
            self._session(request.path_params["session_id"])
        model = {"id": self.upstream.model_name, "object": "model", "created": 0, "owned_by": "termrl"}
        return _json({"object": "list", "data": [model | {"max_model_len": self.upstream.context_window}]})

    async def _create(self, request: Request) -> Response:
        body = validated(SessionRequest, await self._body(request, empty={}))
        return _json({"session_id": self.create_session(order=body.order, sampling=body.sampling)})

    async def _get(self, request: Request) -> Response:
        session = self._session(request.path_params["session_id"])
        ledger = session.ledger
        return _json(
            {
                "session_id": session.session_id,
                "order": session.order,
                "counters": asdict(ledger.counters()),
                "turns": [node.record() for node in ledger.turns()],
                "segments": [asdict(segment) for segment in ledger.segments()],
            }
        )

    async def _delete(self, request: Request) -> Response:
        self.delete_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def _chat(self, request: Request) -> Response:
        session = self._session(request.path_params["session_id"])
        call = ChatRequest.parse(await self._body(request))
        ledger, tools = session.ledger, call.tools or None
        try:
            pending = ledger.prepare(call.plain_messages(), tools)
        except HistoryError as error:
            raise ApiError(error.status, error.message, code=error.code, hint=error.hint) from error
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_messages") from error
        try:
            prompt = pending.prompt_ids
            room = self.upstream.context_window - len(prompt)
            sampling = call.sampling(session.defaults, self.renderer, max(room, 0))
            if room <= 0:
                ledger.count_context_stop()
                full = GenerateResult((), (), "context", -1)
                return self._reply(call, {"role": "assistant", "content": ""}, full, len(prompt), sampling)
            result = await self._generate(request, session, prompt, sampling)
            if result is None:
                return Response(status_code=499)
            parsed = self.renderer.parse_response(list(result.token_ids), tools=tools, prompt_ids=list(prompt))
            message = assistant_message(parsed)
            ledger.commit(pending, result, message, sampling)
            return self._reply(call, message, result, len(prompt), sampling)
        finally:
            ledger.abandon(pending)

    async def _generate(
        self, request: Request, session: PolicySession, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> GenerateResult | None:
        """One upstream call, cancelled when the client goes away (then ``None``)."""
        work = asyncio.create_task(self._upstream_call(session, prompt, sampling))
        gone = asyncio.create_task(_disconnected(request))
        session.running.add(work)
        try:
            await asyncio.wait({work, gone}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return await work
            if gone.done():
                return None
            raise ApiError(504, f"no reply from the engine in {self._timeout_s:g} s", code="engine_timeout")
        except asyncio.CancelledError:
            if work.cancelled() and not _being_cancelled():
                code = "shutting_down" if self._closing else "engine_error"
                raise ApiError(503, "the generation was cancelled", code=code) from None
            raise
        except CaptureError as error:
            raise ApiError(502, error.message, code="capture_error", hint=error.hint) from error
        except PolicyError as error:
            raise ApiError(502, error.message, code="engine_error", hint=error.hint) from error
        finally:
            gone.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.gather(work, gone, return_exceptions=True)
            session.running.discard(work)

    async def _upstream_call(
        self, session: PolicySession, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> GenerateResult:
        request = GenerateRequest(session.session_id, prompt, sampling, session.order)
        try:
            result = await self.upstream.generate(request)
        except (CaptureError, PolicyError):
            raise
        except Exception as error:
            log.exception("the engine failed")
            raise PolicyError(f"the engine failed: {type(error).__name__}: {error}") from error
        check_result(result)
        return result

    def _reply(
        self,
        call: ChatRequest,
        message: dict[str, Any],
        result: GenerateResult,
        prompt_tokens: int,
        sampling: SamplingParams,
    ) -> Response:
        extra = {"max_tokens": sampling.max_tokens, "service_s": result.service_s, "queue_s": result.queue_s}
        body = completion(
            call, message, result, model=self.upstream.model_name, prompt_tokens=prompt_tokens, extra=extra
        )
        headers = {
            f"x-termrl-{name}": f"{value:.6f}"
            for name, value in (("service-s", result.service_s), ("queue-s", result.queue_s))
            if value is not None
        }
        if not call.stream:
            return _json(body, headers=headers)
        events = as_stream(body, include_usage=call.include_usage)
        return StreamingResponse(
            _aiter(events), media_type="text/event-stream", headers={**headers, "cache-control": "no-cache"}
        )

    async def _body(self, request: Request, *, empty: Any = None) -> Any:
        received = bytearray()
        async for chunk in request.stream():
            received += chunk
            if len(received) > self._max_body_bytes:
                raise ApiError(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")
        if not received and empty is not None:
            return empty
        try:
            return orjson.loads(received)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _aiter(events: Iterator[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


def _json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")


def _error(error: ApiError) -> Response:
    # The OpenAI client obeys x-should-retry: a blind retry that races its original would leave an unrecorded reply.
    return _json(error.body(), status=error.status, headers={"x-should-retry": "false"})


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    what = "no such route" if status == 404 else str(error.detail)
    return _error(ApiError(status, f"{request.method} {request.url.path}: {what}", code="http_error"))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_crash(request: Request, error: Exception) -> Response:
    return _error(ApiError(500, f"{type(error).__name__}: {error}", code="internal_error"))
