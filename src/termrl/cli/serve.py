"""``termrl serve``: tasks in sandboxes behind OpenEnv's WebSocket."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from termrl.cli.interrupts import Interrupts
from termrl.cli.tokens import split_tokens
from termrl.environment.server.config import ALIASES, ServeConfig, check_tbench2_variables
from termrl.settings import load_settings

_THREADS = 8
_Flag = Annotated[str | None, Parameter(negative="")]


def serve(
    *tasks: Annotated[str, Parameter(allow_leading_hyphen=True)],
    config: Annotated[tuple[Path, ...], Parameter(name=["--config", "-c"], negative="")] = (),
    sandbox: _Flag = None,
    host: _Flag = None,
    port: _Flag = None,
    token_file: _Flag = None,
    max_sessions: _Flag = None,
    max_memory_mb: _Flag = None,
    default_task_id: _Flag = None,
    skip_broken: Annotated[bool, Parameter(negative="")] = False,
    stop_with_parent: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Serve tasks to OpenEnv clients (Terminal-Bench 2's wire) until it is interrupted.

    Settings come from defaults, then TOML files, then TERMRL_KEY variables (and Terminal-Bench 2's own: TB2_TASKS_DIR,
    TB2_COMMAND_TIMEOUT_S, TB2_DEFAULT_TASK_ID, MAX_CONCURRENT_ENVS), then flags. docs/openenv.md lists them all; those
    not listed here are given as --key VALUE or --section.key VALUE.

    Parameters
    ----------
    tasks
        Folders of Harbor tasks, or task folders.
    config
        TOML file; may be given several times, later ones win.
    sandbox
        Where commands run: bubblewrap or docker.
    host
        Address to listen on (127.0.0.1); any that others can reach needs a token.
    port
        Port to listen on (8003); 0 takes a free one.
    token_file
        File with the token that clients must send; $TERMRL_TOKEN does the same.
    max_sessions
        Sessions, hence sandboxes, at once (64).
    max_memory_mb
        Bound on the sum of memory_mb of the tasks in session (80 % of the machine's memory).
    default_task_id
        Task of a reset that names none (the first).
    skip_broken
        Leave out tasks that are broken or that the sandbox cannot run, and go on.
    stop_with_parent
        End when stdin is closed, hence with the process that holds its other end.
    """
    folders, others = split_tokens(tasks)
    given = {
        "sandbox.backend": sandbox,
        "host": host,
        "port": port,
        "token_file": token_file,
        "max_sessions": max_sessions,
        "max_memory_mb": max_memory_mb,
        "default_task_id": default_task_id,
        "skip_broken": "true" if skip_broken else None,
        "tasks": _toml_list(folders) if folders else None,
    }
    flags = [*others, *(f"--{key}={value}" for key, value in given.items() if value is not None)]
    loaded = load_settings(ServeConfig, files=config, environ=os.environ, aliases=ALIASES, flags=flags)
    for warning in check_tbench2_variables(os.environ):
        _say(f"warning: {warning}")
    return _run(loaded.config, stop_with_parent=stop_with_parent)


def _run(config: ServeConfig, *, stop_with_parent: bool) -> int:
    from termrl.environment.server.running import serve as serving

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="termrl serve: %(levelname)s: %(message)s")
    state = config.sandbox.settings.get("state")

    async def work() -> None:
        interrupts.attach()
        environ = dict(os.environ)
        # no sandbox, and no task that asks for a variable of the host, ever sees it
        os.environ.pop("TERMRL_TOKEN", None)
        await _all_threads_at_once()
        async with serving(config, environ) as server:
            for name, why in server.left_out.items():
                _say(f"left out {name}: {why}")
            sessions, admission = server.sessions, server.sessions.admission
            _say(
                f"{len(sessions.tasks)} tasks in {sessions.backend} sandboxes; a reset without a task gets "
                f"{sessions.default_task_id}; at most {admission.max_sessions} sessions, {admission.max_memory_mb} MiB"
            )
            print(f"termrl serve: listening on {server.url}", flush=True)
            await (_stdin_closed() if stop_with_parent else asyncio.Event().wait())

    farewell = "sandboxes that were left are removed"
    with Interrupts(farewell, state=None if state is None else Path(state), drain_s=config.shutdown_s) as interrupts:
        try:
            asyncio.run(work())
        except (KeyboardInterrupt, asyncio.CancelledError):
            if interrupts.code is None:
                raise
            _say("ended")
    return 0


async def _all_threads_at_once() -> None:
    """Start every thread that the server will ever have, so that a growing number always is a leak."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="termrl-serve")
    loop = asyncio.get_running_loop()
    loop.set_default_executor(pool)
    barrier = threading.Barrier(_THREADS)
    await asyncio.gather(*(loop.run_in_executor(pool, barrier.wait) for _ in range(_THREADS)))


async def _stdin_closed() -> None:
    reader = asyncio.StreamReader(limit=1024)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass


def _toml_list(values: Sequence[str]) -> str:
    import json

    return json.dumps([*values], ensure_ascii=False)


def _say(line: str) -> None:
    print(f"termrl serve: {line}", file=sys.stderr)
