"""``termrl serve --sandbox docker``: real sessions in containers, and ends that leave none behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.docker import IMAGE
from tests.environment.server.served import SECRET, Server, commands_like, served, start, wait_until, wire, write_task
from tests.environment.server.test_vanished_clients import Clients

TASK = f"served-{os.getpid()}"
SLEEP = "sleep 834.25"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, docker_required: None) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, TASK)
    return folder


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tasks' public image stands for one that is here."""
    config = tmp_path_factory.mktemp("config") / "serve.toml"
    config.write_text(f'[images]\n"debian:12-slim" = "{IMAGE}"\n[sandbox.settings]\nhost_image = "debian:12-slim"\n')
    return ["--sandbox", "docker", "--config", str(config)]


def containers() -> list[str]:
    """Names of the containers of this module's task, running or not."""
    from termrl.sandboxes.docker.connection import Connection

    connection = Connection(threads=1)
    try:
        found: list[dict[str, Any]] = connection.client.api.containers(
            all=True, filters={"label": f"termrl.task={TASK}"}
        )
        return [one["Names"][0] for one in found]
    finally:
        connection.close()


async def test_a_session_in_a_container_is_judged_and_its_container_removed(tasks: Path, flags: list[str]) -> None:
    with served(tasks, *flags) as server:
        async with wire(server) as client:
            await client.reset(TASK)
            assert len(containers()) == 1
            assert await client.output("pwd; id -un; cat /etc/debian_version | cut -d. -f1") == "/app\nroot\n12\n"
            await client.output(f"echo {SECRET} > answer.txt")
            judged = await client.step(action_type="evaluate")
            assert (judged["reward"], judged["done"]) == (1.0, True)
        assert wait_until(lambda: containers() == [])
        assert wait_until(server.is_empty)


def test_sigterm_removes_every_container(tasks: Path, flags: list[str]) -> None:
    with served(tasks, *flags) as server:
        clients = Clients(server, 3, SLEEP)
        assert wait_until(lambda: len(commands_like(SLEEP)) == 3)
        started = time.monotonic()
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert time.monotonic() - started < 30
        assert containers() == [] and commands_like(SLEEP) == []
        clients.end()


def test_the_next_start_removes_and_counts_the_containers_of_a_killed_server(tasks: Path, flags: list[str]) -> None:
    with served(tasks, *flags) as server:
        clients = Clients(server, 3, f"setsid {SLEEP} & {SLEEP}")
        assert wait_until(lambda: len(commands_like(SLEEP)) == 6)
        server.process.kill()
        server.process.wait()
        clients.end()
        again = start(tasks, *flags, state=server.state)
        try:
            successor = Server(again, again.stdout.readline().split()[-1], server.state, {})
            assert successor.figures()["termrl_server_sandboxes_swept_total"] == 3
            assert containers() == [] and wait_until(lambda: commands_like(SLEEP) == [])
            assert len(list((server.state / "owners").iterdir())) == 1, "only the new one's"
        finally:
            again.terminate()
            assert again.wait(30) == 0
