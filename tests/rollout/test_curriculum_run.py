"""A whole run with a curriculum, on a tiny model: levels open, are recorded, and a killed run resumes alike."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from termrl.config import TrainConfig
from termrl.runs.files import read_jsonl
from termrl.runs.store import RunStore
from termrl.settings import load_settings, to_toml
from tests.endtoend.tiny import write_model, write_tasks
from tests.states import in_own_state

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[Path]:
    """A state folder of these tests' own, where a sandbox's user can walk to."""
    with in_own_state() as folder:
        yield folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("levels")
    write_model(folder / "model")
    for place, words in (("train", ("apple", "berry")), ("held-out", ("cedar", "delta"))):
        for level, word in enumerate(words, 1):
            write_tasks(folder / place, (word,), family=f"level-{level}", prefix=place)
            toml = folder / place / f"{place}-{word}" / "task.toml"
            toml.write_text(toml.read_text().replace("[metadata]\n", f"[metadata]\nlevel = {level}\n"))
    return folder


def settings(world: Path) -> list[str]:
    values = {
        "model.path": world / "model",
        "model.threads": 1,
        "tasks.dir": world / "train",
        "tasks.curriculum.enabled": "true",
        "tasks.curriculum.threshold": 0.01,
        "tasks.curriculum.window": 2,
        "evaluation.dir": world / "held-out",
        "rollout.groups": 2,
        "rollout.samples": 8,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.lr": 0.02,
        "training.warmup_steps": 0,
        "steps": 3,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "termrl", "train", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def figures(run: Path) -> list[dict[str, Any]]:
    """The metrics without what measures time."""
    return [{k: v for k, v in r.items() if not k.startswith("perf/")} for r in read_jsonl(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def finished(world: Path) -> Path:
    from termrl.training.events import Silent
    from termrl.training.local import prepare, train

    config = load_settings(TrainConfig, flags=settings(world)).config
    model, pools = prepare(config)
    with RunStore.create(world / "first", given="", resolved=to_toml(config)) as store:
        asyncio.run(train(config, store, Silent(), model=model, pools=pools))
    return world / "first"


def test_a_level_opens_and_its_tasks_join(finished: Path) -> None:
    steps = [r for r in figures(finished) if r["phase"] == "train"]
    assert [r["rollout/level"] for r in steps] == [1, 1, 2]
    met = [
        sorted(
            {e["family"] for e in read_jsonl(finished / "episodes.jsonl") if (e["phase"], e["step"]) == ("train", n)}
        )
        for n in range(1, 4)
    ]
    assert met == [["level-1"], ["level-1"], ["level-1", "level-2"]]
    assert orjson.loads((finished / "summary.json").read_bytes())["levels"] == {"1": 1, "2": 3}


def test_a_run_killed_within_a_window_opens_the_next_level_at_the_same_step(world: Path, finished: Path) -> None:
    run = world / "killed"
    process = start(*settings(world), f"--run-dir={run}")
    deadline = time.monotonic() + 90
    while not (run / "checkpoints" / "step-000001").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len([r for r in figures(run) if r["phase"] == "train"]) < 3
    resumed = start("--resume", str(run))
    _, error = resumed.communicate(timeout=100)
    assert resumed.returncode == 0, error
    assert figures(run) == figures(finished)
