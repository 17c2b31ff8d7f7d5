"""The app that openenv.yaml names, under a plain uvicorn."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.environment.server.served import SOURCE, Server, fetch, wait_until, wire

TOKEN = "a-token-of-some-length"


@contextmanager
def uvicorn(port: int, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TB2_", "TERMRL_"))}
    yaml = (SOURCE.parent / "openenv.yaml").read_text()
    app = next(line.split()[1] for line in yaml.splitlines() if line.startswith("app: "))
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", str(port)],
        env={**variables, "PYTHONPATH": str(SOURCE), **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def healthy(url: str) -> bool:
    try:
        return fetch(url + "/health")[0] == 200
    except OSError:
        return False


async def test_it_serves_the_tasks_of_the_environment_to_who_has_the_token(tasks: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with uvicorn(port, {"TB2_TASKS_DIR": str(tasks), "TERMRL_TOKEN": TOKEN}) as process:
        assert wait_until(lambda: healthy(url), 30)
        assert fetch(url + "/tasks")[0] == 401
        server = Server(process, url, tasks, {"Authorization": f"Bearer {TOKEN}"})
        assert json.loads(fetch(url + "/tasks", headers=server.headers)[1])["default_task_id"] == "one"
        async with wire(server) as client:
            await client.reset("two")
            assert await client.output("pwd; env | grep -c TERMRL_TOKEN") == "/app\n0\n"
        assert wait_until(server.is_empty)
    # uvicorn ends in order, and then by the signal that it was sent
    assert process.returncode in (0, -signal.SIGTERM)


def test_it_does_not_start_without_a_token(tasks: Path) -> None:
    with uvicorn(free_port(), {"TB2_TASKS_DIR": str(tasks)}) as process:
        said = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert "a token is needed" in said and "Traceback" not in said
