"""The environment server as a whole: tasks, sandboxes, sessions and the socket, up together and down together."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from termrl.environment.server.admission import Admission
from termrl.environment.server.config import MEMORY_SHARE, ServeConfig
from termrl.environment.server.metrics import CountedProvider, ServerMetrics
from termrl.environment.server.security import Guard, server_token
from termrl.environment.server.session import Limits, Sessions
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.errors import ConfigError, SandboxStartError, TaskError
from termrl.sandboxes import SandboxProvider, SandboxSpec, open_provider
from termrl.sandboxes.host import memory_mb, raise_open_files
from termrl.serving import bind, running, url_of
from termrl.tasks.task import Task
from termrl.tasks.taskset import TaskSet

# A session holds a socket and its sandbox's channel; the rest is for the process and for what is open for moments.
_FILES_PER_SESSION = 2
_FILES_BESIDE = 48
_UVICORN_S = 5
_NAMED = 5


@dataclass(frozen=True)
class EnvironmentServer:
    """A server that accepts connections.

    Attributes:
        url: ``http://host:port``.
        left_out: tasks that are not served, by name, and why.
    """

    url: str
    sessions: Sessions
    provider: SandboxProvider
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Application:
    """The ASGI app of a server, and what is behind it; ``left_out`` as in :class:`EnvironmentServer`."""

    app: ASGIApp
    sessions: Sessions
    provider: SandboxProvider
    left_out: Mapping[str, str]


@contextlib.asynccontextmanager
async def serve(config: ServeConfig, environ: Mapping[str, str]) -> AsyncIterator[EnvironmentServer]:
    """Run the server in this event loop; on leaving, every session and sandbox is ended.

    Args:
        environ: where ``$TERMRL_TOKEN`` is looked up.

    Raises:
        ConfigError: settings that cannot work (see :func:`~termrl.environment.server.security.server_token`), the
            address cannot be had, or openenv is missing.
        TaskError: broken tasks, or ones that the sandbox cannot run (unless ``skip_broken``), or none left.
        SandboxStartError: this machine lacks what the sandboxes need.
    """
    options = {
        "lifespan": "off",
        "ws": "websockets-sansio",
        "ws_ping_interval": config.ping_interval_s,
        "ws_ping_timeout": config.ping_timeout_s,
        # the gate answers what is over max_frame_mb; this only bounds what it has to look at
        "ws_max_size": config.max_frame_mb << 22,
        "ws_per_message_deflate": False,
        "timeout_graceful_shutdown": _UVICORN_S,
    }
    with _listener(config) as listener:
        async with application(config, environ) as behind, running(behind.app, listener, **options):
            try:
                url = url_of(listener, config.host)
                yield EnvironmentServer(url, behind.sessions, behind.provider, behind.left_out)
            finally:
                await behind.sessions.close()


@contextlib.asynccontextmanager
async def application(config: ServeConfig, environ: Mapping[str, str]) -> AsyncIterator[Application]:
    """The app without the socket, for whoever has one; arguments and errors as for :func:`serve`."""
    from termrl.environment.server.app import build_app

    token = server_token(config, environ)
    files = raise_open_files()[0]
    if (needed := config.max_sessions * _FILES_PER_SESSION + _FILES_BESIDE) > files:
        raise ConfigError(
            f"max_sessions: {config.max_sessions} sessions need {needed} open files, this process may have {files}",
            hint="ulimit -n raises that, or lower --max-sessions",
        )
    tasks, left_out = load_tasks(config.tasks, skip_broken=config.skip_broken)
    async with open_provider(config.sandbox.backend, **config.sandbox.provider_settings(config.images)) as inner:
        provider = CountedProvider(inner)
        max_memory_mb = config.max_memory_mb or int(memory_mb() * MEMORY_SHARE)
        tasks, refused = runnable(tasks, provider, max_memory_mb, skip=config.skip_broken)
        if any(task.sandbox.host_userland for task in tasks.values()):
            await _try_one(inner)
        admission = Admission(max_sessions=config.max_sessions, max_memory_mb=max_memory_mb)
        factory = LocalEnvironmentFactory(
            tasks, provider, command_timeout_s=config.command_timeout_s, rules=config.verify.rules()
        )
        sessions = Sessions(
            tasks,
            factory.create,
            admission=admission,
            limits=_limits(config),
            metrics=ServerMetrics(admission, provider, swept=inner.swept_first),
            backend=provider.name,
            default_task_id=_default_task(config, tasks),
        )
        app = Guard(
            build_app(sessions, max_frame_bytes=config.max_frame_mb << 20),
            token=token,
            host=config.host,
            origins=config.allowed_origins,
        )
        yield Application(app, sessions, provider, {**left_out, **refused})


async def _try_one(provider: SandboxProvider) -> None:
    """A machine that can start no sandbox says so at the start, not to the first client."""
    try:
        sandbox = await provider.create(SandboxSpec("serve", host_userland=True))
    except SandboxStartError as error:
        hint = error.hint or "termrl doctor says what this machine lacks"
        raise SandboxStartError(error.message, hint=hint) from None
    await sandbox.stop()


def load_tasks(folders: tuple[Path, ...], *, skip_broken: bool) -> tuple[dict[str, Task], dict[str, str]]:
    """The tasks of several folders by id, and what was left out, by name.

    Raises:
        TaskError: a folder that is none, broken tasks (unless ``skip_broken``), or an id in two folders.
    """
    tasks: dict[str, Task] = {}
    broken: dict[str, str] = {}
    for folder in dict.fromkeys(folders):
        found = TaskSet.load(folder, skip_broken=skip_broken)
        if twice := sorted(tasks.keys() & found.keys()):
            raise TaskError(f"{folder}: {_names(twice)} is in another folder too")
        tasks |= found
        broken |= found.broken
    return dict(sorted(tasks.items())), broken


def runnable(
    tasks: Mapping[str, Task], provider: SandboxProvider, max_memory_mb: int, *, skip: bool
) -> tuple[dict[str, Task], dict[str, str]]:
    """The tasks that can be run here, and why the others cannot.

    Raises:
        TaskError: there are others (unless ``skip``), or nothing but those.
    """
    refused: dict[str, str] = {}
    for task in tasks.values():
        if why := provider.refusal(task.sandbox):
            refused[task.id] = why
        elif (task.sandbox.memory_mb or 0) > max_memory_mb:
            refused[task.id] = f"memory_mb {task.sandbox.memory_mb} is over max_memory_mb {max_memory_mb}"
    good = {name: task for name, task in tasks.items() if name not in refused}
    if refused and not (skip and good):
        lines = [f"{len(refused)} of {len(tasks)} tasks cannot be run by {provider.name}"]
        lines += [f"{name}: {why}" for name, why in list(refused.items())[:_NAMED]]
        lines += [f"and {len(refused) - _NAMED} more"] if len(refused) > _NAMED else []
        raise TaskError("\n".join(lines), hint="--skip-broken goes on with the others" if good else None)
    return good, refused


def _listener(config: ServeConfig) -> socket.socket:
    try:
        listener = bind(config.host, config.port)
    except OSError as error:
        raise ConfigError(
            f"port: cannot listen on {config.host} port {config.port}: {error.strerror or error}",
            hint="--port 0 takes a free one",
        ) from None
    # A client that takes no bytes any more is given up by the kernel, which no ping timeout sees.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.idle_s * 1000))
    return listener


def _limits(config: ServeConfig) -> Limits:
    return Limits(
        command_timeout_s=config.command_timeout_s,
        max_wait_s=config.max_wait_s,
        reset_s=config.reset_s,
        grace_s=config.grace_s,
        close_s=config.close_s,
        idle_s=config.idle_s,
    )


def _default_task(config: ServeConfig, tasks: Mapping[str, Task]) -> str:
    name = config.default_task_id
    if name is not None and name not in tasks:
        raise ConfigError(f"default_task_id: there is no task {name!r} in what is served")
    return name or next(iter(tasks))


def _names(names: list[str]) -> str:
    more = f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
