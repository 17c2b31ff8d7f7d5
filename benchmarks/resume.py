"""SIGKILL at random moments of a training run, resumed each time: how much of the outcome differs from a whole run's.

The command line's own process is killed, most often while it works, now and then while it starts. Compared are all
metrics, episodes, tokens, the summary and the weights, without what measures time. The model is a tiny random one
whose vocabulary holds whole commands; ``--bundled`` trains SmolLM2-135M on first-steps (one run, few kills).
"""

from __future__ import annotations

import argparse
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks._report import Figure, report  # noqa: E402
from tests.endtoend.outcome import differences, outcome  # noqa: E402
from tests.endtoend.tiny import write_model, write_tasks  # noqa: E402

_SOURCE = Path(__file__).resolve().parent.parent / "src"
_WHILE_STARTING = 0.15
_BEGUN = "run folder"
_PARTS = 6


def _settings(folder: Path, *, bundled: bool) -> list[str]:
    if bundled:
        return ["--steps=3", "--rollout.groups=4", "--evaluation.per-family=2"]
    write_model(folder / "model")
    write_tasks(folder / "train", ("apple", "berry"))
    write_tasks(folder / "held-out", ("cedar",), prefix="eval")
    settings: dict[str, object] = {
        "model.path": folder / "model",
        "model.threads": 1,
        "tasks.dir": folder / "train",
        "evaluation.dir": folder / "held-out",
        "evaluation.every": 2,
        "rollout.groups": 2,
        "rollout.samples": 6,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.lr": 0.02,
        "steps": 4,
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def _start(run: Path, settings: list[str]) -> subprocess.Popen[str]:
    """Begin the run, or go on with it where it has written its settings."""
    begun = (run / "config.toml").exists()
    arguments = ["--resume", str(run)] if begun else [*settings, "--run-dir", str(run)]
    variables = {**os.environ, "PYTHONPATH": str(_SOURCE), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "termrl", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
    )


def _wait_begun(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if _BEGUN in line:
            return


def _finish(process: subprocess.Popen[str]) -> None:
    output = process.communicate()[0]
    if process.returncode != 0:
        raise SystemExit(f"the run failed ({process.returncode}):\n{output}")


def _ended_within(process: subprocess.Popen[str], seconds: float) -> bool:
    """Wait for the end, reading what is said so that it never blocks."""
    assert process.stdout is not None
    give_up = time.monotonic() + seconds
    while process.poll() is None and (left := give_up - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], min(left, 0.05))[0]:
            os.read(process.stdout.fileno(), 65536)
    return process.poll() is not None


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """Kill and resume until there were enough kills; then finish the last run, too."""
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="termrl-resume-") as name:
        folder = Path(name)
        settings = _settings(folder, bundled=arguments.bundled)
        started = time.monotonic()
        process = _start(folder / "whole", settings)
        _wait_begun(process)
        begun = time.monotonic()
        _finish(process)
        starting_s, working_s = begun - started, time.monotonic() - begun
        expected = outcome(folder / "whole")

        kills = runs = mismatches = 0
        while kills < arguments.kills:
            run = folder / f"run-{runs}"
            runs += 1
            killed_here, ended = 0, False
            while not ended and kills < arguments.kills and killed_here < _PARTS:
                process = _start(run, settings)
                if draw.random() < _WHILE_STARTING:
                    ended = _ended_within(process, draw.uniform(0.0, starting_s))
                else:
                    _wait_begun(process)
                    ended = _ended_within(process, draw.uniform(0.0, working_s))
                if not ended:
                    process.kill()
                    kills += 1
                    killed_here += 1
                process.communicate()
                if ended and process.returncode != 0:
                    raise SystemExit(f"run {runs} failed by itself ({process.returncode})")
            if not ended:
                _finish(_start(run, settings))
            different = differences(expected, outcome(run))
            mismatches += bool(different)
            if different:
                print(f"run {runs}: {', '.join(different)} differ", file=sys.stderr)
    return [
        Figure("resume_kills", kills, "SIGKILLs", f"≥ {arguments.kills}", kills >= arguments.kills),
        Figure("resume_runs", runs, "runs", "≥ 1", runs >= 1),
        Figure("resume_mismatches", mismatches, "runs", "0", mismatches == 0),
    ]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bundled", action="store_true", help="kill runs of the bundled model")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    report("Resume after SIGKILL", measure(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
