"""A whole run with a curriculum, on a tiny model: levels open, are recorded, and a killed run resumes alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from termrl.runs.files import read_jsonl
from tests.endtoend.tiny import write_model, write_tasks

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[Path]:
    """A state folder of these tests' own, where a sandbox's user can walk to."""
    with tempfile.TemporaryDirectory(prefix="termrl-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERMRL_STATE_DIR", folder)
            yield Path(folder)


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


def start(world: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    settings = {
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
        "steps": 4,
    }
    arguments = more or (*(f"--{key}={value}" for key, value in settings.items()), f"--run-dir={run}")
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
    process = start(world, world / "first")
    _, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    return world / "first"


def test_a_level_opens_and_its_tasks_join(finished: Path) -> None:
    steps = [r for r in figures(finished) if r["phase"] == "train"]
    assert [r["rollout/level"] for r in steps] == [1, 1, 2, 2]
    met = [
        sorted(
            {e["family"] for e in read_jsonl(finished / "episodes.jsonl") if (e["phase"], e["step"]) == ("train", n)}
        )
        for n in range(1, 5)
    ]
    assert met == [["level-1"], ["level-1"], ["level-1", "level-2"], ["level-1", "level-2"]]
    assert orjson.loads((finished / "summary.json").read_bytes())["levels"] == {"1": 1, "2": 3}


@pytest.mark.parametrize("step", [1, 3])
def test_a_killed_run_goes_on_at_the_same_level_with_the_same_figures(world: Path, finished: Path, step: int) -> None:
    run = world / f"killed-{step}"
    process = start(world, run)
    deadline = time.monotonic() + 90
    while not any(r["phase"] == "train" and r["step"] >= step for r in read_jsonl(run / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = start(world, run, "--resume", str(run))
    _, error = resumed.communicate(timeout=100)
    assert resumed.returncode == 0, error
    assert figures(run) == figures(finished)
