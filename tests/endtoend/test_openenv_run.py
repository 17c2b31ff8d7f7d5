"""Training with the environments behind an OpenEnv server: the same run, and a server that dies scores nothing 0."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from termrl.config import TrainConfig
from termrl.errors import ConfigError, EnvironmentLostError, RunError, TaskError, TermrlError
from termrl.runs.files import read_jsonl
from termrl.runs.resume import resumed_config
from termrl.runs.store import RunStore
from termrl.settings import load_settings, to_toml
from termrl.training.events import Silent
from tests.endtoend.outcome import differences, outcome
from tests.endtoend.served import Served, served
from tests.endtoend.tiny import write_tasks

ROOT = Path(__file__).parents[2]


def flags(world: Path, **overrides: object) -> list[str]:
    settings: dict[str, object] = {
        "model.path": world / "model",
        "model.threads": 1,
        "tasks.dir": world / "train",
        "evaluation.dir": world / "held-out",
        "rollout.groups": 2,
        "rollout.samples": 6,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.lr": 0.02,
        "training.warmup_steps": 0,
        "steps": 2,
    }
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    return [f"--{key}={value}" for key, value in settings.items()]


def run_here(world: Path, run: Path, watcher: Silent | None = None, **overrides: object) -> dict[str, Any]:
    from termrl.training.local import prepare, train

    config = load_settings(TrainConfig, flags=flags(world, **overrides)).config
    model, pools = prepare(config)
    with RunStore.create(run, given="", resolved=to_toml(config)) as store:
        return asyncio.run(train(config, store, watcher or Silent(), model=model, pools=pools))


def refused(world: Path, kind: type[TermrlError], match: str, **overrides: object) -> None:
    """Before a run folder would be made."""
    from termrl.training.local import prepare

    config = load_settings(TrainConfig, flags=flags(world, **overrides)).config
    with pytest.raises(kind, match=match):
        prepare(config)


def same(one: Path, other: Path) -> list[str]:
    """What differs, but for how a server describes itself at reset."""
    outcomes = [outcome(one), outcome(other)]
    for found in outcomes:
        for episode in found["episodes"]:
            del episode["info"]["reset"]
    return differences(*outcomes)


class Killer(Silent):
    """Kills a process some time after a phase of a step begins."""

    def __init__(self, pid: Callable[[], int], *, name: str, step: int, delay_s: float) -> None:
        self.pid, self.when, self.delay_s = pid, (name, step), delay_s
        self.killed: int | None = None

    def phase(self, name: str, *, step: int, total: int) -> None:
        if (name, step) == self.when and self.killed is None:
            threading.Timer(self.delay_s, self.kill).start()

    def kill(self) -> None:
        self.killed = self.pid()
        os.kill(self.killed, signal.SIGKILL)


def servers_below(process: psutil.Process) -> list[psutil.Process]:
    """The servers that runs of this process started."""
    return [child for child in process.children() if child.cmdline()[2:5] == ["termrl", "serve", "-c"]]


def own_server() -> int:
    (server,) = servers_below(psutil.Process())
    return server.pid


@pytest.fixture(scope="module")
def here(world: Path) -> Path:
    run_here(world, world / "here")
    return world / "here"


@pytest.fixture(scope="module")
def server(world: Path, state: Path) -> Iterator[Served]:
    with served(world / "train", world / "held-out", arguments=("--max-sessions", "12")) as server:
        yield server


def test_a_run_that_serves_its_own_environments_is_the_same_to_the_last_token(world: Path, here: Path) -> None:
    run_here(world, world / "served", environment__serve=True)
    assert same(world / "served", here) == []
    assert {e["attempts"] for e in read_jsonl(world / "served" / "episodes.jsonl")} == {1}
    assert servers_below(psutil.Process()) == []
    assert "listening on http://127.0.0.1:" in (world / "served" / "environment-server.log").read_text()


def test_a_run_on_a_server_elsewhere_is_the_same_and_may_resume_here(world: Path, here: Path, server: Served) -> None:
    run = world / "elsewhere"
    run_here(world, run, environment__url=server.url, rollout__concurrency=12)
    assert same(run, here) == []
    config = resumed_config(run, flags=["--environment.url=none", "--environment.serve"])
    assert config.environment.url is None and config.environment.serve
    with pytest.raises(ConfigError, match=r"environment\.allow_exposed_tests would change: False → True"):
        resumed_config(run, flags=["--environment.allow-exposed-tests"])


def test_an_own_server_that_is_killed_in_mid_run_comes_back_and_no_episode_is_lost(world: Path, here: Path) -> None:
    run = world / "came-back"
    killer = Killer(own_server, name="rollout", step=2, delay_s=0.2)
    summary = run_here(world, run, killer, environment__serve=True)
    assert killer.killed is not None
    assert summary["stopped"] is None
    assert summary["dropped"] == {}
    assert set(summary["retried"]) <= {"environment_lost", "sandbox_start"} and sum(summary["retried"].values()) >= 1
    again = [e for e in read_jsonl(run / "episodes.jsonl") if e["attempts"] > 1]
    assert len(again) == sum(summary["retried"].values())
    assert all(e["reward"] is not None and e["info"]["lost"][0]["error"] for e in again)
    assert (run / "environment-server.log").read_text().count("listening on") == 2
    assert servers_below(psutil.Process()) == []


def test_a_server_that_is_gone_for_good_stops_the_run_with_the_cause_and_scores_nothing_0(world: Path) -> None:
    run = world / "gone"
    with served(world / "train", world / "held-out") as server:
        killer = Killer(lambda: server.process.pid, name="rollout", step=2, delay_s=0.0)
        overrides = {"environment.url": server.url, "environment.capacity_wait_s": 1, "rollout.concurrency": 12}
        with pytest.raises(RunError, match=r"no episode of the last 2 steps got a verdict \(\d+ environment_lost"):
            run_here(world, run, killer, **overrides, steps=50)
    episodes = [e for e in read_jsonl(run / "episodes.jsonl") if e["phase"] == "train"]
    lost = [e for e in episodes if e["step"] > 2]
    assert len(lost) >= 12
    assert {(e["reward"], e["cause"], e["attempts"]) for e in lost} == {(None, "environment_lost", 2)}
    assert all("no environment server answers" in e["error"] for e in lost)
    assert not any(e["reward"] is None and (e["trained"] or e["advantage"]) for e in episodes)
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert "environment_lost" in summary["stopped"] and summary["retried"]["environment_lost"] >= 12


def test_a_killed_run_takes_its_server_and_its_sandboxes_along(world: Path, state: Path) -> None:
    run = world / "killed-run"
    owners = set((state / "owners").iterdir())
    arguments = [*flags(world, environment__serve=True, steps=500), f"--run-dir={run}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "termrl", "train", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.DEVNULL,
    )
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and b'"train"' in metrics.read_bytes(), 120)
    (server,) = servers_below(psutil.Process(process.pid))
    below = [server, *server.children(recursive=True)]
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(one) for one in below), 30)
    wait_until(lambda: set((state / "owners").iterdir()) <= owners, 30)


def test_a_server_that_cannot_be_used_is_refused_by_name_before_anything_is_written(
    world: Path, server: Served, tmp_path: Path
) -> None:
    other = write_tasks(tmp_path / "other", ("cedar", "delta"))
    refused(world, EnvironmentLostError, "no answer: Connection refused", environment__url="http://127.0.0.1:9")
    refused(
        world,
        TaskError,
        r"does not serve 2 of the run's 3 tasks:\nmake-cedar\nmake-delta$",
        **{"tasks.dir": other, "environment.url": server.url, "rollout.concurrency": 12},
    )
    refused(
        world,
        ConfigError,
        "has 12 sessions, but 18 episodes run at once, and in lock-step none of them begins",
        **{"environment.url": server.url, "rollout.groups": 3},
    )
    refused(
        world,
        TaskError,
        "does not serve .* tasks:\nmake-dir-train-000",
        **{"tasks.dir": None, "evaluation.dir": None, "environment.url": server.url, "tasks.families": "make-dir"},
    )


def test_tasks_of_the_same_name_but_another_text_end_the_run(world: Path, server: Served, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "renamed", ("apple", "berry"))
    (tasks / "make-berry" / "instruction.md").write_text("Make a directory named cherry.\n")
    overrides = {"tasks.dir": tasks, "environment.url": server.url, "rollout.concurrency": 12}
    with pytest.raises(TaskError, match="task make-berry is another than this run's: 'Make a directory named berry"):
        run_here(world, tmp_path / "run", **overrides)


def test_more_episodes_than_sessions_take_turns_where_nothing_waits_for_all(world: Path, tmp_path: Path) -> None:
    with served(world / "train", world / "held-out", arguments=("--max-sessions", "4")) as server:
        overrides = {"environment.url": server.url, "rollout.schedule": "continuous", "steps": 1}
        summary = run_here(world, tmp_path / "run", **overrides)
    assert (summary["steps"], summary["dropped"], summary["retried"]) == (1, {}, {})
    waits = [e["timings"]["admission_s"] for e in read_jsonl(tmp_path / "run" / "episodes.jsonl")]
    assert max(waits) > 0


def test_a_busy_server_is_waited_for(world: Path, server: Served, tmp_path: Path) -> None:
    from termrl.environment.client import SyncEnvClient
    from termrl.training.local import prepare

    overrides = {"environment.url": server.url, "rollout.concurrency": 12}
    said: list[str] = []
    client = SyncEnvClient(server.url)
    client.connect()
    client.reset("make-apple")
    threading.Timer(1.0, client.close).start()
    began = time.monotonic()
    prepare(load_settings(TrainConfig, flags=flags(world, **overrides)).config, said.append)
    assert time.monotonic() - began > 0.9
    assert said == [f"{server.url}: waiting for 12 free sessions (1 of 12 are in use)"]


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "in vain"
        time.sleep(0.02)
