"""``termrl probe`` against real servers: ours, openenv's own with an echo environment, none at all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.served import Served, served
from tests.endtoend.tiny import write_tasks

SOURCE = Path(__file__).parents[2] / "src"

ECHO = """
import sys
sys.modules["gradio"] = None
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
import uvicorn

class Echo(Action):
    message: str
    volume: int

class Heard(Observation):
    message: str = ""

class Parrot(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self): self.count = 0
    def reset(self, seed=None, episode_id=None, **more): return Heard(message="hello")
    def step(self, action, timeout_s=None, **more):
        self.count += 1
        if len(sys.argv) > 2 and self.count > 3: raise RuntimeError("the parrot is dead")
        return Heard(message=action.message, reward=0.0)
    @property
    def state(self): return State(step_count=self.count)

app = create_fastapi_app(Parrot, Echo, Heard, max_concurrent_envs=3)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def probe(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "termrl", "probe", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "160", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def found(*arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    done = probe(*arguments, "--json", **variables)
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def echo(folder: Path, *arguments: str) -> Iterator[str]:
    port = free_port()
    (folder / "echo.py").write_text(ECHO)
    process = subprocess.Popen([sys.executable, str(folder / "echo.py"), str(port), *arguments])
    try:
        give_up = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < give_up
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="termrl-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def server(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("probed")
    tasks = write_tasks(folder / "tasks", ("apple", "berry"))
    (folder / "token").write_text("open-sesame-0123456789\n")
    (folder / "token").chmod(0o600)
    arguments = ("--max-sessions", "3", "--token-file", str(folder / "token"))
    with served(tasks, arguments=arguments, TERMRL_STATE_DIR=str(state)) as server:
        yield server


def test_a_server_of_ours_is_usable_and_each_stage_is_timed(server: Served, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open-sesame-0123456789")
    code, data = found(server.url, "--token-file", str(tmp_path / "token"), "--rounds", "5", "--task", "make-berry")
    assert (code, data["exit_code"], data["usable"], data["failed"]) == (0, 0, True, None)
    assert (data["kind"], data["canonical"]) == ("terminal", True)
    stages = {stage["name"]: stage for stage in data["stages"]}
    assert list(stages) == [
        *("health", "schema", "open", "reset", "exec true", "exec echo", "state", "evaluate", "close"),
        *("sessions at once", "slots come back"),
    ]
    assert [stages[name]["count"] for name in ("open", "exec true", "state")] == [1, 5, 5]
    assert all(0 < stage["median_ms"] <= stage["p95_ms"] for stage in stages.values())
    assert data["sessions"] == 8 and data["admitted"] + data["refused"] == 8
    assert 2 <= data["admitted"] <= 3, "the first session's slot may still be in use"
    assert stages["evaluate"]["note"] == "canonical: reward 0"


def test_the_table_says_what_the_json_says(server: Served) -> None:
    done = probe(server.url, "--sessions", "2", "--rounds", "2", TERMRL_TOKEN="open-sesame-0123456789")
    assert done.returncode == 0, done.stdout
    assert "terminal environment" in done.stdout and "median ms" in done.stdout and "p95 ms" in done.stdout
    assert "2 of 2 admitted" in done.stdout
    assert done.stdout.rstrip().endswith("usable")


@pytest.mark.parametrize(("token", "said"), [("wrong", "refuses the token"), ("", "wants a bearer token")])
def test_a_wrong_or_missing_token_is_bad_input(server: Served, token: str, said: str) -> None:
    done = probe(server.url, TERMRL_TOKEN=token)
    assert done.returncode == 2
    assert said in done.stderr and "hint" in done.stderr and "Traceback" not in done.stderr
    assert "open-sesame-0123456789" not in done.stderr + done.stdout


def test_a_task_that_is_not_there_fails_the_reset(server: Served) -> None:
    code, data = found(server.url, "--task", "make-nothing", TERMRL_TOKEN="open-sesame-0123456789")
    assert (code, data["failed"]) == (5, "reset")
    assert "make-nothing" in next(stage["error"] for stage in data["stages"] if stage["name"] == "reset")


def test_a_full_server_admits_nobody(server: Served) -> None:
    from termrl.environment.client import ClientOptions, SyncEnvClient

    clients = [
        SyncEnvClient(server.url, ClientOptions(token="open-sesame-0123456789", capacity_wait_s=30)) for _ in range(3)
    ]
    try:
        for client in clients:
            client.connect()
            client.reset("make-apple")
        code, data = found(server.url, TERMRL_TOKEN="open-sesame-0123456789")
    finally:
        for client in clients:
            client.close()
    assert (code, data["failed"], data["refused"]) == (4, "reset", 1)


def test_nobody_there_has_a_code_of_its_own() -> None:
    code, data = found(f"http://127.0.0.1:{free_port()}")
    assert (code, data["failed"], data["kind"]) == (3, "health", "unknown")
    assert "Connection refused" in data["stages"][0]["error"]


@pytest.mark.parametrize("arguments", [("ftp://host",), ("http://user:secret@host",), ("http://host", "--sessions=-1")])
def test_bad_arguments_are_named(arguments: tuple[str, ...]) -> None:
    done = probe(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "secret" not in done.stderr


def test_an_echo_environment_on_openenvs_own_server_is_usable(tmp_path: Path) -> None:
    with echo(tmp_path) as url:
        code, data = found(url, "--rounds", "5", "--sessions", "5")
        assert (code, data["kind"], data["canonical"], data["failed"]) == (0, "other", None, None)
        stages = {stage["name"]: stage for stage in data["stages"]}
        assert stages["step"]["count"] == 5 and "volume" in stages["step"]["note"]
        assert (data["admitted"], data["refused"]) in ((3, 2), (2, 3))


def test_an_environment_whose_steps_fail_is_not_usable(tmp_path: Path) -> None:
    with echo(tmp_path, "fails") as url:
        code, data = found(url, "--rounds", "5", "--sessions", "1")
    assert (code, data["failed"]) == (5, "step")
    step = next(stage for stage in data["stages"] if stage["name"] == "step")
    assert step["count"] == 3 and "the parrot is dead" in step["error"]


def test_an_action_is_made_up_from_any_schema() -> None:
    from termrl.environment.probe import made_up

    schema = {
        "properties": {
            "text": {"type": "string", "minLength": 20},
            "kind": {"enum": ["a", "b"]},
            "count": {"type": "integer", "minimum": 3},
            "inner": {"$ref": "#/$defs/Inner"},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "many": {"type": "array", "items": {"type": "number"}, "minItems": 2},
            "optional": {"type": "string"},
        },
        "required": ["text", "kind", "count", "inner", "either", "many"],
        "$defs": {"Inner": {"type": "object", "properties": {"x": {"const": 7}}, "required": ["x"]}},
    }
    made = made_up(schema)
    assert len(made.pop("text")) == 20
    assert made == {"kind": "a", "count": 3, "inner": {"x": 7}, "either": False, "many": [0, 0]}
    loop = {"properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"]}
    loop["$defs"] = {"X": {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"]}}
    assert "x" in made_up(loop)
    assert made_up({}) == {}


@pytest.mark.parametrize(("kind", "canonical"), [("older_app", False), ("newer_app", True)])
def test_of_other_terminal_environments_it_says_who_scores(kind: str, canonical: bool, tmp_path: Path) -> None:
    from tests.environment import upstreams

    tasks = write_tasks(tmp_path / "tasks", ("apple",))
    with upstreams.hosted_in_thread(getattr(upstreams, kind)(tasks)) as url:
        code, data = found(url, "--task", "make-apple", "--rounds", "2", "--sessions", "2")
    assert (code, data["kind"], data["canonical"]) == (0, "terminal", canonical)
