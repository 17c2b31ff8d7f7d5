"""Whole runs of a tiny model that are tracked and scraped, and that nothing of it can harm."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from termrl.agent.types import Episode
from termrl.config import TrainConfig
from termrl.runs.files import read_jsonl
from termrl.runs.store import RunStore
from termrl.runs.trackers import TrackerWatcher
from termrl.settings import load_settings, to_toml
from termrl.training.events import Silent, Together, Watcher

SOURCE = Path(__file__).parents[2] / "src"


def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) for package in packages)


def flags(world: Path) -> list[str]:
    settings = {
        "model.path": world / "model",
        "model.threads": 1,
        "tasks.dir": world / "train",
        "evaluation.dir": world / "held-out",
        "rollout.groups": 2,
        "rollout.samples": 6,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.lr": 0.02,
        "steps": 2,
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "termrl", "train", *arguments],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path[1:]])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_here(world: Path, run: Path, watcher: Watcher) -> dict[str, Any]:
    from termrl.training.local import prepare, train

    config = load_settings(TrainConfig, flags=flags(world)).config
    model, pools = prepare(config)
    with RunStore.create(run, given="", resolved=to_toml(config)) as store:
        return asyncio.run(train(config, store, watcher, model=model, pools=pools))


def figures(run: Path) -> list[dict[str, Any]]:
    """The metrics without what measures time."""
    return [{k: v for k, v in r.items() if not k.startswith("perf/")} for r in read_jsonl(run / "metrics.jsonl")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scrape(port: int) -> dict[str, float] | None:
    """Every series by its text; ``None`` while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
    except (urllib.error.URLError, ConnectionError):
        return None
    return {name: float(value) for name, value in (ln.rsplit(" ", 1) for ln in lines if not ln.startswith("#"))}


def test_a_run_can_be_scraped_while_it_lasts_and_its_tracker_has_every_figure(world: Path) -> None:
    run, port = world / "tracked", free_port()
    arguments = ["--run-dir", str(run), "--track", "tensorboard", "--prometheus-port", str(port)]
    process = start(*flags(world), *arguments)
    scrapes: list[dict[str, float]] = []
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        if (samples := scrape(port)) is not None:
            scrapes.append(samples)
        time.sleep(0.02)
    process.kill()
    error = process.communicate()[1]
    if not installed("tensorboard", "prometheus_client"):
        assert process.returncode == 2
        assert "  hint: pip install 'termrl[" in error
        assert not run.exists()
        return
    assert process.returncode == 0, error
    assert scrape(port) is None

    assert {s["termrl_step"] for s in scrapes} >= {0, 1, 2}
    assert max(s["termrl_live_sandboxes"] for s in scrapes) > 1
    last = scrapes[-1]
    episodes = {name: value for name, value in last.items() if name.startswith("termrl_episodes_total{")}
    assert sum(value for name, value in episodes.items() if 'phase="train"' in name) == 24
    assert sum(value for name, value in last.items() if name.startswith("termrl_missing_verdicts_total")) == 0

    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = {(tag, p.step): p.value for tag in events.Tags()["scalars"] for p in events.Scalars(tag)}
    recorded = {
        (name, record["step"]): value
        for record in read_jsonl(run / "metrics.jsonl")
        for name, value in record.items()
        if "/" in name
    }
    assert len(recorded) > 50
    assert points == pytest.approx(recorded, rel=1e-6)  # TensorBoard keeps float32


def test_a_taken_port_ends_the_command_before_there_is_a_run_folder(world: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(*flags(world), "--run-dir", str(world / "no-port"), "--prometheus-port", str(port))
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    expected = f"cannot listen on 127.0.0.1 port {port}" if installed("prometheus_client") else "prometheus-client"
    assert f"termrl: error: track.prometheus_port: {expected}" in error or expected in error
    assert "Traceback" not in error
    assert not (world / "no-port").exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (["--track", "mlflow"], "command line: track.to: input should be 'none', 'wandb', 'tensorboard' or 'trackio'"),
        (["--prometheus-port", "99999"], "command line: track.prometheus_port: input should be less than or equal"),
    ],
)
def test_bad_flags_are_refused_like_any_setting(world: Path, flag: list[str], message: str) -> None:
    process = start(*flags(world), "--run-dir", str(world / "bad"), *flag)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert message in error
    assert not (world / "bad").exists()


class Broken:
    """A tracker whose server went away after it opened."""

    def begin(self, first_step: int) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("gone")

    def close(self, summary: Mapping[str, Any] | None) -> None:
        raise ConnectionError("still gone")


class Observer(Silent):
    """Counts the sandboxes that are up whenever an episode ends."""

    def __init__(self) -> None:
        self.live: Callable[[], int] = lambda: -1
        self.seen: list[int] = []

    def sandboxes(self, live: Callable[[], int]) -> None:
        self.live = live

    def episode(self, episode: Episode) -> None:
        self.seen.append(self.live())


def test_a_broken_tracker_neither_ends_a_run_nor_changes_a_figure(world: Path) -> None:
    warnings: list[str] = []
    observer = Observer()
    with TrackerWatcher("broken", Broken, warn=warnings.append) as tracker:
        summary = run_here(world, world / "broken", Together([observer, tracker]))
    assert summary["stopped"] is None
    assert summary["steps"] == 2
    assert warnings == [
        "broken: failed, the run goes on: ConnectionError: gone",
        "broken: 5 of 6 calls failed; metrics.jsonl is whole",
    ]
    run_here(world, world / "plain", Silent())
    assert figures(world / "broken") == figures(world / "plain")
    assert len(observer.seen) == 26
    assert min(observer.seen) >= 0
    assert max(observer.seen) > 1
    assert observer.live() == 0


def test_ctrl_c_in_a_tracked_run_closes_the_tracker_and_leaves_no_process(world: Path) -> None:
    run = world / "interrupted"
    arguments = ["--steps", "500", "--training.lr", "1e-6", "--run-dir", str(run), "--track", "wandb"]
    process = start(*flags(world), *arguments, WANDB_MODE="offline", HOME=str(world))
    deadline = time.monotonic() + 60
    while process.poll() is None and not any(record["step"] for record in read_jsonl(run / "metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if not installed("wandb"):
        assert "pip install 'termrl[wandb]'" in process.communicate()[1]
        assert process.returncode == 2
        return
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "warning" not in error
    assert error.index("go on with:") < error.index("wandb sync")
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_resumed_run_may_be_tracked_elsewhere_but_not_changed(world: Path) -> None:
    run = world / "untracked"
    run_here(world, run, Silent())
    process = start("--resume", str(run), "--training.lr", "9")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "training.lr would change: 0.02 → 9.0" in error
    before = (run / "config.toml").read_bytes()
    process = start("--resume", str(run), "--track", "tensorboard")
    error = process.communicate(timeout=60)[1]
    assert (run / "config.toml").read_bytes() == before
    if not installed("tensorboard"):
        assert process.returncode == 2
        assert "pip install 'termrl[tensorboard]'" in error
        assert (run / "summary.json").exists()
        return
    assert process.returncode == 0, error
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
