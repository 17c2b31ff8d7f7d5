"""Running the session server: one event loop with its engine, on a loopback socket."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import AsyncIterator

from termrl.capture.app import SessionServer
from termrl.capture.ledger import OnDivergence
from termrl.capture.render import Renderer
from termrl.capture.upstreams import Upstream
from termrl.serving import bind, running, url_of

__all__ = ["SessionServer", "raise_open_file_limit", "serve"]

_KEEP_ALIVE_S = 600  # longer than clients keep an idle connection, so that none is closed under a request
_OPEN_FILES = 65_536


@contextlib.asynccontextmanager
async def serve(
    upstream: Upstream,
    renderer: Renderer,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    on_divergence: OnDivergence = "branch",
    timeout_s: float = 3600.0,
    max_sessions: int = 20_000,
    max_body_bytes: int = 64 * 2**20,
) -> AsyncIterator[SessionServer]:
    """Run a session server in this event loop; ``server.url`` says where. Port 0 takes a free one.

    On leaving, generations in flight are cancelled, and the socket is closed. The other arguments are those of
    :class:`~termrl.capture.app.SessionServer`.

    Raises:
        OSError: the address cannot be bound.
    """
    raise_open_file_limit()
    server = SessionServer(
        upstream,
        renderer,
        on_divergence=on_divergence,
        timeout_s=timeout_s,
        max_sessions=max_sessions,
        max_body_bytes=max_body_bytes,
    )
    with bind(host, port) as listener:
        server.url = url_of(listener, host)
        options = {"lifespan": "off", "ws": "none", "timeout_keep_alive": _KEEP_ALIVE_S, "timeout_graceful_shutdown": 5}
        async with running(server.app, listener, **options):
            try:
                yield server
            finally:
                await server.aclose()


def raise_open_file_limit(wanted: int = _OPEN_FILES) -> int:
    """Raise the soft limit of open files to ``wanted`` or the hard limit; one connection an episode is normal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return soft
