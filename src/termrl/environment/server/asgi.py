"""The environment server for other ASGI servers: ``uvicorn termrl.environment.server.asgi:app``.

It takes its settings from the environment (``TB2_TASKS_DIR``, ``TERMRL_…``; see ``docs/openenv.md``). As it cannot know
who reaches the socket, it wants a token, unless ``TERMRL_HOST`` says that it is on loopback. One worker only: each has
sandboxes and slots of its own.
"""

from __future__ import annotations

import contextlib
import os

from starlette.types import ASGIApp, Receive, Scope, Send

from termrl.environment.server.config import ALIASES, ServeConfig, check_tbench2_variables
from termrl.environment.server.running import application
from termrl.errors import TermrlError
from termrl.settings import load_settings

_ANYWHERE = {"TERMRL_HOST": "0.0.0.0"}


class EnvironmentApp:
    """Starts and ends with the ASGI server's lifespan; an error of ours at the start is the server's last words."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, one connection, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is None:
            raise RuntimeError("the ASGI server has to run the lifespan first")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        environ = {**_ANYWHERE, **os.environ}
        # no sandbox, and no task that asks for a variable of the host, ever sees it
        os.environ.pop("TERMRL_TOKEN", None)
        async with contextlib.AsyncExitStack() as stack:
            try:
                check_tbench2_variables(environ)
                config = load_settings(ServeConfig, files=(), environ=environ, aliases=ALIASES, flags=()).config
                behind = await stack.enter_async_context(application(config, environ))
            except TermrlError as error:
                hint = f" ({error.hint})" if error.hint else ""
                await send({"type": "lifespan.startup.failed", "message": f"{error.message}{hint}"})
                return
            stack.push_async_callback(behind.sessions.close)
            self._app = behind.app
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


app = EnvironmentApp()
