"""openenv's server over our sessions, and the pages beside it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from termrl.environment.server.gate import Gate, current_connection
from termrl.environment.server.openenv import (
    Environment,
    EnvironmentFactoryError,
    HTTPEnvServer,
    SessionCapacityError,
)
from termrl.environment.server.session import Sessions
from termrl.environment.server.wire import (
    NAME,
    TerminalAction,
    TerminalEnvironment,
    TerminalObservation,
    TerminalState,
)
from termrl.errors import TermrlError
from termrl.tasks.task import Task

API_VERSION = "1.0.0"
"""Of OpenEnv's HTTP interface, by which its validator knows the profile; ``/metadata`` has the version of termrl."""

_TOO_MANY = 503
_BAD = 422
_FAILED = 500
_PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class SessionServer(HTTPEnvServer):
    """openenv's server, whose sessions are ours.

    What is not openenv's own here, and why:

    - a session is opened and ended by :class:`Sessions`: openenv frees the slot before the sandbox is gone, waits for
      ``close`` without a bound, and keeps a thread for each session;
    - sessions are not in openenv's table: there any client could attach to, or close, another's by its id;
    - ``session_timeout`` is ``None``: openenv's closes an environment under a live socket, in mid-step.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._ours = sessions
        self._open: dict[str, TerminalEnvironment] = {}
        super().__init__(
            self._make,
            TerminalAction,
            TerminalObservation,
            max_concurrent_envs=sessions.admission.max_sessions,
            env_name=NAME,
            state_cls=TerminalState,
        )

    def _make(self) -> Environment:
        return TerminalEnvironment(self._ours)

    async def _create_session(self) -> tuple[str, Environment]:
        connection = current_connection()
        if connection is None:
            raise EnvironmentFactoryError(NAME, "a session is a WebSocket connection to /ws")
        environment = TerminalEnvironment(self._ours)
        connection.own(await environment.open())
        name = str(uuid.uuid4())
        self._open[name] = environment
        return name, environment

    async def _destroy_session(self, session_id: str) -> None:
        environment = self._open.pop(session_id, None)
        if environment is not None and environment.session is not None:
            await environment.session.close()


def build_app(sessions: Sessions, *, max_frame_bytes: int) -> ASGIApp:
    """Everything that the server answers, without a guard in front of it."""
    app = FastAPI(title="termrl environment server", version=API_VERSION)
    SessionServer(sessions).register_routes(app, mode="simulation")
    _add_pages(app, sessions)
    app.add_exception_handler(SessionCapacityError, _answer("CAPACITY_REACHED", _TOO_MANY))
    app.add_exception_handler(TermrlError, _answer("EXECUTION_ERROR", _FAILED))
    app.add_exception_handler(ValidationError, _answer("VALIDATION_ERROR", _BAD))
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    return Gate(app, max_frame_bytes=max_frame_bytes, metrics=sessions.metrics)


def _add_pages(app: FastAPI, sessions: Sessions) -> None:
    tasks = {"tasks": [describe(task) for task in sessions.tasks.values()], "default_task_id": sessions.default_task_id}

    async def list_tasks(request: Request) -> Response:
        return JSONResponse(tasks)

    async def capacity(request: Request) -> Response:
        admission = sessions.admission
        return JSONResponse(
            {
                "active_sessions": admission.active,
                "max_sessions": admission.max_sessions,
                "free_sessions": admission.max_sessions - admission.active,
                "memory_mb": admission.memory_mb,
                "max_memory_mb": admission.max_memory_mb,
                "backend": sessions.backend,
            }
        )

    async def metrics(request: Request) -> Response:
        return Response(sessions.metrics.page(), media_type=_PLAIN_TEXT)

    app.router.routes.extend([Route("/tasks", list_tasks), Route("/capacity", capacity), Route("/metrics", metrics)])


def describe(task: Task) -> dict[str, Any]:
    """What a client may know of a task before it resets to it."""
    return {
        "id": task.id,
        "family": task.family,
        "level": task.level,
        "memory_mb": task.sandbox.memory_mb,
        "agent_timeout_sec": task.agent_timeout_s,
        "verifier_timeout_sec": task.verifier_timeout_s,
    }


def _answer(code: str, status: int) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        body: Mapping[str, Any] = {"code": code, "message": str(error)}
        return JSONResponse(body, status_code=status)

    return answer


def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _refused(_BAD, error.errors())


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refused(error.status_code, error.detail)


def _refused(status: int, detail: Any) -> Response:
    """With a code, and without the input: FastAPI repeats it, and breaks on what JSON cannot hold, such as infinity."""
    if isinstance(detail, Sequence) and not isinstance(detail, str):
        detail = [{"loc": [str(part) for part in one["loc"]], "msg": one["msg"]} for one in detail]
    code, message = HTTPStatus(status).name, HTTPStatus(status).phrase
    if status == _BAD:
        code, message = "VALIDATION_ERROR", "the request is not of the endpoint's form"
    return JSONResponse({"code": code, "message": message, "detail": detail}, status_code=status)


def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"code": "EXECUTION_ERROR", "message": "internal error; see the server's log"}, _FAILED)
