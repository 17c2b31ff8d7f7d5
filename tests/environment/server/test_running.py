"""Starting and ending: the first line, bad settings, the variables users know, and what a killed server leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from termrl.environment.server.config import ALIASES, ServeConfig, check_tbench2_variables
from termrl.environment.server.running import load_tasks, serve
from termrl.errors import ConfigError, TaskError
from termrl.sandboxes.sweep import remains
from termrl.settings import load_settings
from tests.environment.server.served import commands_like, fetch, served, start, wait_until, wire, write_task
from tests.environment.server.test_vanished_clients import Clients


def loaded(*flags: str, **environ: str) -> ServeConfig:
    return load_settings(ServeConfig, environ=environ, aliases=ALIASES, flags=flags).config


def test_the_variables_of_tbench2_fill_the_same_settings() -> None:
    config = loaded(
        TB2_TASKS_DIR="/data/tasks", TB2_COMMAND_TIMEOUT_S="45", TB2_DEFAULT_TASK_ID="x", MAX_CONCURRENT_ENVS="5"
    )
    assert config.tasks == (Path("/data/tasks"),)
    assert (config.command_timeout_s, config.default_task_id, config.max_sessions) == (45.0, "x", 5)


def test_flags_win_over_our_variables_and_those_over_theirs() -> None:
    theirs = {"MAX_CONCURRENT_ENVS": "5", "TB2_TASKS_DIR": "a"}
    assert loaded(**theirs, TERMRL_MAX_SESSIONS="6").max_sessions == 6
    assert loaded("--max-sessions", "7", **theirs, TERMRL_MAX_SESSIONS="6").max_sessions == 7


def test_a_bad_value_names_the_variable_that_gave_it() -> None:
    with pytest.raises(ConfigError, match="MAX_CONCURRENT_ENVS: max_sessions: "):
        loaded("--tasks", "a", MAX_CONCURRENT_ENVS="many")


@pytest.mark.parametrize(
    ("name", "value"), [("TB2_MODE", "local"), ("TB2_WITHHOLD_TESTS", "0"), ("TB2_WITHHOLD_TESTS", "false")]
)
def test_what_this_server_never_does_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_tbench2_variables({name: value})


def test_what_has_no_meaning_here_is_warned_of_by_name() -> None:
    given = {"TB2_REPO_URL": "x", "TB2_OUTPUT_DIR": "x", "TB2_CACHE_DIR": "x", "TB2_TASK_WORKDIR": "x"}
    warned = check_tbench2_variables({**given, "TB2_MODE": "docker", "TB2_WITHHOLD_TESTS": "1"})
    assert sorted(line.split()[0].partition("=")[0] for line in warned) == sorted([*given, "TB2_MODE"])
    assert check_tbench2_variables({}) == []


def test_a_server_started_by_variables_alone(tasks: Path, tmp_path: Path) -> None:
    env = {"TB2_TASKS_DIR": str(tasks), "MAX_CONCURRENT_ENVS": "3", "TB2_DEFAULT_TASK_ID": "two"}
    with served(None, env=env) as server:
        assert server.get("/capacity")["max_sessions"] == 3
        assert server.get("/tasks")["default_task_id"] == "two"


def test_bad_settings_are_said_in_a_line_each_and_nothing_is_started(tasks: Path, tmp_path: Path) -> None:
    process = start(
        tasks, "--max-sessions", "0", "--ping-interval-s", "x", "--nonsense", "1", state=tmp_path, stderr=-1
    )
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    for name in ("max_sessions", "ping_interval_s", "nonsense"):
        assert name in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--default-task-id", "nope"), "default_task_id"),
        (("--sandbox.backend", "nope"), "nope"),
        (("--max-sessions", "10000000"), "open files"),
        (("--max-memory-mb", "64"), "max_memory_mb"),
    ],
)
async def test_what_cannot_work_is_refused_at_the_start(tasks: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises((ConfigError, TaskError), match=said):
        async with serve(loaded(f"--tasks={tasks}", "--port", "0", *flags), {}):
            pass


async def test_a_port_that_is_taken_is_said(tasks: Path) -> None:
    async with serve(loaded(f"--tasks={tasks}", "--port", "0"), {}) as server:
        port = server.url.rsplit(":", 1)[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            async with serve(loaded(f"--tasks={tasks}", "--port", port), {}):
                pass


def test_several_folders_are_one_set_unless_an_id_is_in_two(tmp_path: Path) -> None:
    for folder, name in (("a", "one"), ("b", "two"), ("c", "one")):
        write_task(tmp_path / folder, name)
    tasks, broken = load_tasks((tmp_path / "b", tmp_path / "a"), skip_broken=False)
    assert (list(tasks), broken) == (["one", "two"], {})
    with pytest.raises(TaskError, match="one is in another folder too"):
        load_tasks((tmp_path / "a", tmp_path / "c"), skip_broken=False)


async def test_tasks_that_the_sandbox_cannot_run_are_refused_or_left_out(tmp_path: Path) -> None:
    write_task(tmp_path, "one")
    text = (write_task(tmp_path, "image") / "task.toml").read_text().replace('termrl_userland = "host"\n', "")
    (tmp_path / "image" / "task.toml").write_text(text)
    config = loaded(f"--tasks={tmp_path}", "--port", "0")
    with pytest.raises(TaskError, match="image: needs image debian:12-slim"):
        async with serve(config, {}):
            pass
    async with serve(config.model_copy(update={"skip_broken": True}), {}) as server:
        assert list(server.sessions.tasks) == ["one"] and list(server.left_out) == ["image"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "parent"])
def test_an_orderly_end_closes_every_session_within_its_bound(tasks: Path, how: Any) -> None:
    with served(tasks) as server:
        clients = Clients(server, 5, "sleep 831.25")
        started = time.monotonic()
        if how == "parent":
            server.process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        else:
            server.process.send_signal(how)
        assert server.process.wait(20) == 0
        assert time.monotonic() - started < 10
        assert commands_like("sleep 831.25") == [] and remains(server.state) == []
        clients.end()


def test_it_ends_also_while_clients_are_stopped(tasks: Path) -> None:
    with served(tasks) as server:
        clients = Clients(server, 3, "yes | head -c 3000000; sleep 0.3")
        clients.signal(signal.SIGSTOP)
        time.sleep(0.5)
        server.process.terminate()
        assert server.process.wait(20) == 0
        clients.end()


def test_a_killed_server_leaves_nothing_after_the_sweep_of_the_next_start(tasks: Path) -> None:
    with served(tasks) as server:
        clients = Clients(server, 20, "for i in 1 2; do setsid sleep 832.25 & done; sleep 832.25")
        assert wait_until(lambda: len(commands_like("sleep 832.25")) == 60)
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) > 20
        server.process.kill()
        server.process.wait()
        clients.end()
        again = start(tasks, state=server.state)
        try:
            url = again.stdout.readline().split()[-1]
            assert wait_until(lambda: commands_like("sleep 832.25") == [])
            assert remains(server.state) == []
            assert psutil.wait_procs(family, timeout=5)[1] == []
            assert len(list((server.state / "owners").iterdir())) == 1, "only the new one's"
            figures = dict(line.rsplit(" ", 1) for line in fetch(url + "/metrics")[1].splitlines() if line[0] != "#")
            assert float(figures["termrl_server_sandboxes_swept_total"]) >= 20
        finally:
            again.terminate()
            assert again.wait(20) == 0


async def test_files_run_out_for_some_and_the_server_goes_on(tasks: Path) -> None:
    """Connections beyond what the process may have open are kept waiting, and nobody's session is harmed."""
    with served(tasks, "--max-sessions", "4", files=64) as server:
        async with wire(server) as client:
            await client.reset()
            sockets = []
            host, port = server.url.removeprefix("http://").split(":")
            for _ in range(80):
                sockets.append(await asyncio.open_connection(host, int(port)))
            for _ in range(3):
                assert await client.output("echo here") == "here\n"
            for _, writer in sockets:
                writer.close()
        assert await asyncio.to_thread(wait_until, server.is_empty, 10)


async def test_sixty_four_idle_sessions_fit_in_the_memory_that_is_promised(tasks: Path) -> None:
    with served(tasks) as server:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(wire(server)) for _ in range(64)]
            await asyncio.gather(*(client.reset() for client in clients))
            assert server.figures()["termrl_live_sandboxes"] == 64
            assert psutil.Process(server.process.pid).memory_info().rss < 250 << 20
        assert await asyncio.to_thread(wait_until, server.is_empty, 10)


def test_the_import_brings_none_of_what_a_server_never_uses() -> None:
    code = "import sys, termrl.environment.server.app; print({'gradio', 'pandas', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    assert done.stdout == "set()\n", done.stderr
