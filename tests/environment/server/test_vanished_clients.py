"""A client that is gone, however it went, keeps no slot, no sandbox, no command and no file open."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from termrl.environment.server.config import ServeConfig
from tests.environment.server.served import Server, commands_like, served, wait_until, wire, write_task

# Forks as many clients as it is told, each with a command that runs on and on; says so, and waits to be killed.
CLIENTS = """
import json, os, sys, time
from websockets.sync.client import connect
url, count, command = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def play():
    with connect(url, compression=None, open_timeout=60) as socket:
        socket.send(json.dumps({"type": "reset", "data": {}}))
        answer = json.loads(socket.recv())
        assert answer["type"] == "observation", answer
        socket.send(json.dumps({"type": "step", "data": {"command": command, "wait_seconds": 600}}))
        os.write(1, b".")
        socket.recv()

for _ in range(count):
    if os.fork() == 0:
        try:
            play()
        finally:
            os._exit(1)
time.sleep(600)
"""


class Clients:
    """Processes that are all in mid-step."""

    def __init__(self, server: Server, count: int, command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENTS, server.socket_url, str(count), command],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.read(count) == b"." * count

    def signal(self, number: int) -> None:
        """To every one of them at once."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Whatever they are."""
        self.signal(signal.SIGKILL)
        self.process.communicate()


def held(server: Server) -> tuple[int, int]:
    """Open files and threads of the server."""
    process = psutil.Process(server.process.pid)
    return process.num_fds(), process.num_threads()


def kept(server: Server) -> tuple[int, int]:
    """The fewest it held within a second: the connection of a request just answered is open for a moment more."""
    seen = []
    for _ in range(20):
        seen.append(held(server))
        time.sleep(0.05)
    return min(files for files, _ in seen), min(threads for _, threads in seen)


def test_a_hundred_clients_killed_in_mid_step_leave_nothing_time_after_time(tasks: Path) -> None:
    with served(tasks, "--max-sessions", "100", files=256) as server:
        after = []
        for _ in range(2):
            clients = Clients(server, 100, "setsid sleep 811.25 & sleep 811.25")
            assert server.active == 100
            assert wait_until(lambda: len(commands_like("sleep 811.25")) == 200)
            clients.end()
            assert wait_until(server.is_empty, 15)
            assert commands_like("sleep 811.25") == []
            assert wait_until(lambda: held(server)[0] < 16, 5), held(server)
            after.append(kept(server))
        assert after[0] == after[1]
        figures = server.figures()
        assert figures["termrl_server_sandboxes_created_total"] == figures["termrl_server_sandboxes_ended_total"] == 200


@pytest.mark.parametrize("how", ["closed", "cut"])
async def test_a_client_that_leaves_in_mid_step_is_noticed_at_once(server: Server, how: str) -> None:
    async with wire(server, close_timeout=1) as client:
        await client.reset()
        await client.socket.send('{"type": "step", "data": {"command": "sleep 812.25", "wait_seconds": 600}}')
        assert await asyncio.to_thread(wait_until, lambda: bool(commands_like("sleep 812.25")))
        started = time.monotonic()
        if how == "closed":
            await client.socket.close()
        else:
            client.socket.transport.abort()
        assert await asyncio.to_thread(wait_until, server.is_empty, 5)
        assert time.monotonic() - started < 3
        assert commands_like("sleep 812.25") == []


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a task whose tests take their time."""
    folder = tmp_path_factory.mktemp("slow")
    write_task(folder, "one", test="sleep 813.25\n", verifier_s=600)
    with served(folder) as server:
        yield server


_STEP = '{"type": "step", "data": {"action_type": '
_DOING = {
    "reset": '{"type": "reset"}',
    "evaluate": _STEP + '"evaluate"}}',
    "wait": _STEP + '"wait", "session_id": "s", "wait_seconds": 99}}',
    "write_file": _STEP + '"write_file", "file_path": "x", "content": "' + "x" * (8 << 20) + '"}}',
}


@pytest.mark.parametrize("doing", list(_DOING))
async def test_whatever_it_was_doing(slow: Server, doing: str) -> None:
    async with wire(slow) as client:
        if doing != "reset":
            await client.reset()
            await client.step(command="sleep 813.5", block=False, session_id="s")
        await client.socket.send(_DOING[doing])
        await asyncio.sleep(0.3 if doing in ("evaluate", "wait") else 0.01)
        client.socket.transport.abort()
    assert await asyncio.to_thread(wait_until, slow.is_empty, 10)
    assert commands_like("sleep 813.*") == []


def test_a_client_that_is_stopped_is_given_up_after_its_ping_timeout(tasks: Path) -> None:
    """OpenEnv#1000: half-open sockets held their slots until the server took nobody any more."""
    with served(tasks, "--ping-interval-s", "0.5", "--ping-timeout-s", "0.5", "--max-sessions", "3") as server:
        clients = Clients(server, 3, "sleep 814.25")
        try:
            time.sleep(1.5)
            assert server.active == 3, "a client that lives answers pings in mid-step"
            clients.signal(signal.SIGSTOP)
            assert wait_until(server.is_empty, 10)
            assert commands_like("sleep 814.25") == []
        finally:
            clients.end()


def test_a_client_that_is_stopped_is_given_up_when_idle_where_pings_are_off(tasks: Path) -> None:
    with served(tasks, "--ping-interval-s", "none", "--idle-s", "1.5", "--max-sessions", "2") as server:
        clients = Clients(server, 2, "yes | head -c 5000000; sleep 0.5")
        try:
            clients.signal(signal.SIGSTOP)
            assert wait_until(server.is_empty, 15)
            assert server.figures()["termrl_server_sessions_reaped_total"] == 2
            assert wait_until(lambda: held(server)[0] < 20, 10), "the sockets are closed too"
        finally:
            clients.end()


async def test_a_client_that_takes_no_bytes_is_given_up_too(tasks: Path) -> None:
    """Its answers fill every buffer on the way, so that the server's sending is what hangs."""
    with served(tasks, "--idle-s", "1.5", "--ping-interval-s", "none") as server:
        async with wire(server) as client:
            await client.reset()
            client.socket.transport.pause_reading()
            for _ in range(60):
                await client.socket.send('{"type": "step", "data": {"action_type": "write_file", "content": "x"}}')
                await client.socket.send('{"type": "step", "data": {"x": "' + "y" * 300_000 + '"}}')
                await asyncio.sleep(0)
            assert await asyncio.to_thread(wait_until, server.is_empty, 10)
            assert await asyncio.to_thread(wait_until, lambda: held(server)[0] < 20, 10)
            client.socket.transport.abort()


async def test_silence_is_survived_where_pings_are_off_and_where_they_are_on(tasks: Path) -> None:
    """OpenEnv#875 and #362: a tunnel that drops pings, and a client that says nothing for 90 s while it generates."""
    flags = ("--ping-interval-s", "0.2", "--ping-timeout-s", "none", "--idle-s", "30")
    with served(tasks, *flags) as server:
        async with wire(server, ping_interval=None) as client:
            await client.reset()
            client.socket.transport.pause_reading()  # no pong goes back
            await asyncio.sleep(2)
            client.socket.transport.resume_reading()
            assert await client.output("sleep 1; echo there") == "there\n"


def test_the_default_intervals_survive_ninety_seconds_of_silence() -> None:
    config = ServeConfig(tasks=(Path("x"),))
    assert config.ping_timeout_s is not None and config.ping_timeout_s > 90 and config.idle_s > 90
