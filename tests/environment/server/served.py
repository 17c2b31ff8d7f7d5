"""A real ``termrl serve`` in a process of its own, and a client that says what it is told to, right or wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.states import own_state

SOURCE = Path(__file__).parents[3] / "src"
SECRET = "forty-two-5f1c"
CHECK = f"""\
if [ "$(cat answer.txt 2>/dev/null)" = {SECRET} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, name: str, *, test: str = CHECK, memory_mb: int = 128, verifier_s: float = 30.0) -> Path:
    """A Harbor task whose answer is :data:`SECRET` in answer.txt."""
    task = folder / name
    (task / "tests").mkdir(parents=True)
    (task / "environment").mkdir()
    (task / "environment" / "README").write_text("nothing here\n")
    (task / "instruction.md").write_text("Write the answer to answer.txt.\n")
    (task / "task.toml").write_text(
        f'schema_version = "1.4"\n[task]\nname = "tiny/{name}"\n'
        '[metadata]\ntermrl_userland = "host"\nfamily = "tiny"\nlevel = 1\n'
        '[environment]\ndocker_image = "debian:12-slim"\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
        f"memory_mb = {memory_mb}\nstorage_mb = 32\n"
        f"[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = {verifier_s}\n"
    )
    (task / "tests" / "test.sh").write_text(test)
    return task


@dataclass
class Server:
    """A server that is up."""

    process: subprocess.Popen[str]
    url: str
    state: Path
    headers: dict[str, str]

    @property
    def socket_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/ws"

    def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        return json.loads(fetch(self.url + path, headers=self.headers)[1])

    def figures(self) -> dict[str, float]:
        """Every sample of ``/metrics``."""
        lines = fetch(self.url + "/metrics", headers=self.headers)[1].splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    @property
    def active(self) -> int:
        return self.get("/capacity")["active_sessions"]

    def is_empty(self) -> bool:
        """Whether no slot is taken and no sandbox is up."""
        return self.active == 0 and self.figures()["termrl_live_sandboxes"] == 0


@contextmanager
def served(
    tasks: Path | None,
    *flags: str,
    env: Mapping[str, str] | None = None,
    token: str | None = None,
    files: int | None = None,
) -> Iterator[Server]:
    """Serve ``tasks`` with a state folder of its own; ``files`` bounds the open files of the server."""

    def bound_files() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    with own_state() as state:
        process = start(tasks, *flags, env=env, state=state, preexec_fn=bound_files)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("termrl serve: listening on "), line
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            yield Server(process, line.split()[-1], state, headers)
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()


def start(tasks: Path | None, *flags: str, env: Mapping[str, str] | None = None, state: Path, **more: Any) -> Any:
    """Start ``termrl serve`` on a free port; without ``tasks`` its variables say what is served."""
    folders = [] if tasks is None else [str(tasks)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TB2_", "TERMRL_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "termrl", "serve", *folders, "--port", "0", "--stop-with-parent", *flags],
        env={**variables, "PYTHONPATH": str(SOURCE), "TERMRL_STATE_DIR": str(state), **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **more,
    )


class Wire:
    """One WebSocket, and what is sent over it, as it is."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, text: str | bytes) -> dict[str, Any]:
        """Send one frame and take one answer."""
        # a server that is full has answered and closed before it is asked
        with contextlib.suppress(ConnectionClosed):
            await self.socket.send(text)
        return json.loads(await self.socket.recv())

    async def ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """One message of tbench2's, and its answer."""
        return await self.say(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))

    async def reset(self, task_id: str = "one", **more: Any) -> dict[str, Any]:
        """The data of the observation; fails the test if it is an error."""
        return _data(await self.ask("reset", {"task_id": task_id, **more}))

    async def step(self, **action: Any) -> dict[str, Any]:
        """The data of the observation; fails the test if it is an error."""
        return _data(await self.ask("step", action))

    async def output(self, command: str) -> str:
        """What a command prints."""
        return (await self.step(command=command))["observation"]["output"]


@asynccontextmanager
async def wire(server: Server, **options: Any) -> AsyncIterator[Wire]:
    """A connection to ``server``."""
    async with connect(
        server.socket_url, max_size=None, compression=None, additional_headers=server.headers, **options
    ) as socket:
        yield Wire(socket)


def fetch(url: str, *, headers: Mapping[str, str] | None = None, data: bytes | None = None) -> tuple[int, str]:
    """Status and body of one request."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=dict(headers or {}))) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether ``condition`` came true in time."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def commands_like(pattern: str) -> list[str]:
    """Command lines of this machine's processes that match."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            if re.fullmatch(pattern, line):
                found.append(line)
    return found


def _data(frame: dict[str, Any]) -> dict[str, Any]:
    assert frame["type"] == "observation", frame
    return frame["data"]
