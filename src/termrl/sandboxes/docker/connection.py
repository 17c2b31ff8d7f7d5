"""A connection to a Docker daemon (or to podman's socket): blocking calls in threads, its errors in one line."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from termrl.errors import SandboxStartError

if TYPE_CHECKING:
    import docker

T = TypeVar("T")

DEFAULT_HOST = "unix:///var/run/docker.sock"

_MAX_SAID = 400
_CALL_S = 120


class Connection:
    """One daemon, and the threads in which it is asked.

    Args:
        host: where it listens; ``None`` for ``$DOCKER_HOST``, else the usual socket.
        threads: how many calls can wait for it at once.

    Attributes:
        host: where it listens.
        client: the SDK's client.
        info: what it said of itself (``docker info``) when the connection was made.
        about: likewise, of its version (``docker version``).

    Raises:
        SandboxStartError: the SDK is not installed, or no daemon answers, or this user may not ask it.
    """

    def __init__(self, host: str | None = None, *, threads: int = 16) -> None:
        self.host = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        self.client = _connect(host, self.host, threads)
        try:
            self.info: dict[str, Any] = self.client.info()
            self.about: dict[str, Any] = self.client.version()
        except Exception as error:
            self.client.close()
            raise unreachable(error, self.host) from error
        self._pool = started_threads(threads, "termrl-docker")

    @property
    def podman(self) -> bool:
        """Whether it is podman, which answers as Docker does but cannot be asked for everything."""
        return is_podman(self.about)

    @property
    def id(self) -> str:
        """What the daemon calls itself."""
        return str(self.info.get("ID") or self.host)

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a blocking call in a thread. A caller that is cancelled does not end the call."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **options))

    def close(self) -> None:
        """End the threads and the connection. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.client.close()


def said_by(error: BaseException) -> str:
    """What a daemon or the SDK said, in one short line."""
    text = str(getattr(error, "explanation", None) or error)
    return re.sub(r"\s+", " ", text).strip()[:_MAX_SAID]


def is_podman(about: Mapping[str, Any]) -> bool:
    """Whether a daemon that says this of its version is podman."""
    components = about.get("Components") or []
    return any("podman" in str(part.get("Name", "")).lower() for part in components)


def unreachable(error: BaseException, host: str) -> SandboxStartError:
    """The error for a daemon that cannot be asked at all, with what to do about it."""
    for cause in _chain(error):
        if isinstance(cause, PermissionError):
            return SandboxStartError(
                f"docker: no permission to use the daemon at {host}",
                hint="sudo usermod -aG docker $USER, then log in again (that group is as good as root)",
            )
        if isinstance(cause, FileNotFoundError | ConnectionError):
            return SandboxStartError(
                f"docker: no daemon answers at {host}",
                hint="start it (sudo systemctl start docker), or set DOCKER_HOST to where it listens, for podman "
                "unix:///run/user/$UID/podman/podman.sock",
            )
    return SandboxStartError(f"docker: the daemon at {host} cannot be used: {said_by(error)}")


def _connect(given: str | None, host: str, threads: int) -> docker.DockerClient:
    try:
        import docker
    except ImportError as error:
        raise SandboxStartError(
            "docker: the docker SDK is not installed", hint="pip install 'termrl[docker]'"
        ) from error
    try:
        environment = {**os.environ, "DOCKER_HOST": host} if given else None
        client = docker.DockerClient.from_env(timeout=_CALL_S, max_pool_size=threads, environment=environment)
    except Exception as error:
        raise unreachable(error, host) from error
    # A connection that is kept would be a descriptor for each thread; a new one costs less than a millisecond.
    client.api.headers["Connection"] = "close"
    return client


def started_threads(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run already, so that their number does not grow while sandboxes come and go."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    gate = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(gate.wait)
    gate.wait()
    return pool


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and all that it holds or came from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__, getattr(one, "reason", None)]
        waiting += [held for held in one.args if isinstance(held, BaseException)]
