"""Nothing outlives its owner, and nobody else's container is touched."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import termrl
from termrl.cli.sweep import sweep as sweep_verb
from termrl.errors import SandboxStartError
from termrl.sandboxes import open_provider
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.docker import reaper
from termrl.sandboxes.docker.connection import Connection
from termrl.sandboxes.docker.doctor import checks
from termrl.sandboxes.docker.provider import DockerProvider
from termrl.sandboxes.sweep import this_process

SANDBOXES = 3


@pytest.fixture
def connection(docker_required: None) -> Iterator[Connection]:
    connection = Connection(threads=1)
    yield connection
    connection.close()


@pytest.fixture
def foreign(connection: Connection, docker_image: str) -> Iterator[str]:
    """A container that is none of termrl's, though its name might say so."""
    api = connection.client.api
    made = api.create_container(docker_image, ["sleep", "300"], name=f"termrl-foreign-{os.getpid()}")
    api.start(made["Id"])
    yield made["Id"]
    api.remove_container(made["Id"], force=True)


def killed_owner(state: Path, image: str, connection: Connection) -> str:
    """Have another process own sandboxes, kill it, and return its containers' owner."""
    facts = {
        "backend": "docker",
        "settings": {"state": str(state)},
        "spec": {"task_id": "killed", "image": image},
        "sandboxes": SANDBOXES,
        "daemons": 2,
        "seconds": "300",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "termrl.sandboxes.conformance.owner", json.dumps(facts)],
        env={**os.environ, "PYTHONPATH": str(Path(termrl.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    (owner,) = {
        one["Labels"][reaper.OWNER]
        for one in connection.client.api.containers(filters={"label": f"termrl.pid={process.pid}"})
    }
    process.send_signal(signal.SIGKILL)
    process.wait()
    return owner


def states(connection: Connection, owner: str) -> list[str]:
    found = connection.client.api.containers(all=True, filters={"label": f"{reaper.OWNER}={owner}"})
    return [one["State"] for one in found]


def test_containers_end_with_their_killed_owner_and_a_sweep_removes_them_and_nothing_else(
    connection: Connection, state: Path, docker_image: str, foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = killed_owner(state, docker_image, connection)
    give_up = time.monotonic() + 10
    while set(states(connection, owner)) != {"exited"} and time.monotonic() < give_up:
        time.sleep(0.05)
    assert states(connection, owner) == ["exited"] * SANDBOXES
    left = reaper.remains(connection.client, state)
    assert sum(owner in line for line in left if line.startswith("container ")) == SANDBOXES
    assert sweep_verb(state=state, sandbox="docker") == 0
    assert f"{SANDBOXES} containers" in capsys.readouterr().out
    assert states(connection, owner) == []
    assert connection.client.api.inspect_container(foreign)["State"]["Running"]


async def test_a_live_owners_containers_are_not_swept_and_close_removes_them(
    connection: Connection, state: Path, docker_image: str
) -> None:
    provider = DockerProvider(state=state)
    sandbox = await provider.create(SandboxSpec("t", image=docker_image))
    owner = connection.client.api.inspect_container(sandbox.id)["Config"]["Labels"][reaper.OWNER]
    assert provider.sweep().containers == 0
    assert states(connection, owner) == ["running"]
    await provider.close()
    assert states(connection, owner) == []
    with pytest.raises(SandboxStartError, match="closed"):
        await provider.create(SandboxSpec("t", image=docker_image))


def test_who_is_an_orphan() -> None:
    now = 1_000_000.0
    mine = {f"termrl.{name}": str(value) for name, value in this_process().items()} | {"termrl.deadline": f"{now + 9}"}
    dead = {**mine, "termrl.start": "1"}
    other_machine = {**mine, "termrl.boot": "another"}
    table = [
        (mine, "running", False),
        (mine, "exited", False),
        (dead, "running", True),
        ({**dead, "termrl.pidns": "pid:[1]"}, "running", False),
        (other_machine, "running", False),
        (other_machine, "exited", True),
        ({**mine, "termrl.deadline": f"{now - 1}"}, "running", True),
        ({reaper.OWNER: "someone's own label"}, "exited", False),
    ]
    assert [reaper.is_orphan(labels, state, now) for labels, state, _ in table] == [orphan for *_, orphan in table]


def test_the_reaper_comes_back_after_an_error_and_ends() -> None:
    calls = []

    def reap() -> None:
        calls.append(1)
        raise OSError("the daemon restarts")

    thread = reaper.Reaper(reap, period_s=0.01)
    give_up = time.monotonic() + 5
    while len(calls) < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    thread.close()
    done = len(calls)
    time.sleep(0.05)
    assert done >= 3 and len(calls) == done


def test_no_daemon_is_one_line_with_what_to_do() -> None:
    with pytest.raises(SandboxStartError, match="no daemon answers at unix:///no/such") as missing:
        Connection("unix:///no/such/docker.sock")
    assert "systemctl start docker" in (missing.value.hint or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not use the socket")
def test_a_socket_that_this_user_may_not_use_is_one_line_with_what_to_do() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        path = Path(folder, "docker.sock")
        server.bind(str(path))
        server.listen()
        path.chmod(0o600)
        Path(folder).chmod(0o755)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            try:
                Connection(f"unix://{path}")
            except SandboxStartError as error:
                os._exit(0 if "no permission" in error.message and "usermod" in (error.hint or "") else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def test_settings_that_are_wrong_are_a_config_error(docker_required: None) -> None:
    from termrl.errors import ConfigError

    with pytest.raises(ConfigError, match=r"sandbox: docker: .*colour"):
        open_provider("docker", colour="blue")
    with pytest.raises(ConfigError, match=r"^images\.parallel: .*greater"):
        open_provider("docker", images={"parallel": 0})


def test_the_doctor_names_each_part_of_the_daemon_and_what_a_missing_one_needs(
    docker_required: None, state: Path
) -> None:
    found = {one.name: one for one in checks(state)}
    assert {"resident", "daemon", "API", "architecture", "cgroups", "storage", "disk", "network"} <= set(found)
    assert all(one.ok for one in found.values() if one.must)
    *_, gone = checks(state, "unix:///no/such.sock")
    assert (gone.name, gone.ok, gone.must) == ("daemon", False, True) and gone.fix


async def test_sandboxes_can_be_made_and_stopped_at_once(state: Path, docker_image: str) -> None:
    async with DockerProvider(state=state) as provider:
        made = await asyncio.gather(*(provider.create(SandboxSpec("t", image=docker_image)) for _ in range(8)))
        said = await asyncio.gather(*(one.exec(f"echo {one.id}", timeout_s=20) for one in made))
        assert [one.output.strip() for one in said] == [one.id for one in made]
        assert provider.live == 8
        await asyncio.gather(*(one.stop() for one in made))
        assert provider.live == 0 and provider.remains() == []
