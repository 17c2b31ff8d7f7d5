"""A run goes on after SIGKILL at any moment, with its own settings only, and nothing of the killed one stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import psutil
import pytest

from termrl.config import TrainConfig
from termrl.runs.files import read_jsonl
from termrl.runs.store import RunStore
from termrl.settings import load_settings, to_toml
from termrl.training.events import Silent
from tests.endtoend.faults import FaultyProvider, faulty
from tests.endtoend.outcome import differences, outcome
from tests.endtoend.tiny import write_tasks

ROOT = Path(__file__).parents[2]
VARIABLES = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}


def flags(world: Path, **overrides: object) -> list[str]:
    settings: dict[str, object] = {
        "model.path": world / "model",
        "model.threads": 1,
        "tasks.dir": world / "train",
        "evaluation.dir": world / "held-out",
        "rollout.groups": 1,
        "rollout.samples": 6,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.lr": 0.02,
        "training.warmup_steps": 0,
        "steps": 2,
    }
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    return [f"--{key}={value}" for key, value in settings.items()]


def run_here(world: Path, run: Path, **overrides: object) -> Path:
    from termrl.training.local import prepare, train

    config = load_settings(TrainConfig, flags=flags(world, checkpoint__keep=9, **overrides)).config
    model, pools = prepare(config)
    with RunStore.create(run, given="", resolved=to_toml(config)) as store:
        asyncio.run(train(config, store, Silent(), model=model, pools=pools))
    return run


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "termrl", "train", *arguments],
        env={**os.environ, **VARIABLES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module")
def killed(world: Path) -> tuple[Path, dict[int, tuple[int, int]]]:
    """Runs killed at points spread over all moments at which they make something durable, then resumed."""
    folder = world / "killed"
    program = [sys.executable, "-m", "tests.endtoend.killed_at", str(folder), "7", *flags(world, evaluation__every=1)]
    done = subprocess.run(program, env={**os.environ, **VARIABLES}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total, *points = done.stdout.splitlines()
    assert int(total) > 40
    return folder, {int(at): (int(first), int(then)) for at, first, then in map(str.split, points)}


def test_a_run_killed_wherever_it_makes_something_durable_resumes_to_the_same_outcome(
    killed: tuple[Path, dict[int, tuple[int, int]]],
) -> None:
    folder, points = killed
    expected = outcome(folder / "whole")
    assert len(points) == 7
    for at, (first, then) in points.items():
        assert (first, then) == (signal.SIGKILL, 0), f"killed at {at}"
        assert differences(expected, outcome(folder / f"at-{at}")) == [], f"killed at {at}"
        assert not [path for path in (folder / f"at-{at}").rglob(".*") if path.name != "."]


def test_no_episode_is_recorded_twice(killed: tuple[Path, dict[int, tuple[int, int]]]) -> None:
    folder, points = killed
    for at in points:
        train = [e for e in read_jsonl(folder / f"at-{at}" / "episodes.jsonl") if e["phase"] == "train"]
        assert len({(e["step"], e["group"], e["sample"]) for e in train}) == len(train) == 12
        evaluations = [m["name"] for m in read_jsonl(folder / f"at-{at}" / "metrics.jsonl") if m["phase"] == "eval"]
        assert evaluations == ["before", "at step 1", "after"]


def test_evaluated_checkpoints_are_scored_by_their_evaluation(
    killed: tuple[Path, dict[int, tuple[int, int]]],
) -> None:
    run = killed[0] / "whole"
    rates = {m["step"]: m["eval/pass_rate"] for m in read_jsonl(run / "metrics.jsonl") if m["phase"] == "eval"}
    for path in (run / "checkpoints").iterdir():
        record = orjson.loads((path / "checkpoint.json").read_bytes())
        assert record["score"] == rates[record["step"]]


@pytest.fixture(scope="module")
def whole(world: Path) -> Path:
    """An undisturbed run of three steps."""
    return run_here(world, world / "three", steps=3)


def test_a_checkpoint_is_scored_by_what_its_own_weights_sampled(whole: Path) -> None:
    rewards = {m["step"]: m["rollout/raw_reward"] for m in read_jsonl(whole / "metrics.jsonl") if m["phase"] == "train"}
    summary = orjson.loads((whole / "summary.json").read_bytes())
    scores = {
        record["step"]: record["score"]
        for path in (whole / "checkpoints").iterdir()
        if (record := orjson.loads((path / "checkpoint.json").read_bytes()))
    }
    assert scores == {0: summary["eval_before"], 1: rewards[2], 2: rewards[3], 3: summary["eval_after"]}


def test_more_steps_of_a_finished_run_are_those_of_a_longer_run(world: Path, whole: Path) -> None:
    run = run_here(world, world / "longer", steps=1)
    assert orjson.loads((run / "summary.json").read_bytes())["steps"] == 1
    # the original command again, with another number of steps
    process = start(*flags(world, steps=3, checkpoint__keep=9), "--run-dir", str(run), "--resume", str(run))
    error = process.communicate(timeout=100)[1]
    assert process.returncode == 0, error
    assert differences(outcome(whole), outcome(run)) == []
    assert "steps = 3" in (run / "config.toml").read_text()


def test_other_settings_are_refused_with_every_differing_key(world: Path, whole: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    other = tmp_path / "other.toml"
    other.write_text("seed = 7\n[training]\nlr = 0.5\n[track]\nproject = 'mine'\n")
    process = start("--resume", str(whole), "-c", str(other), "--rollout.samples", "4", "--steps", "9")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    for line in (
        "seed would change: 0 → 7",
        "training.lr would change: 0.02 → 0.5",
        "rollout.samples would change: 6 → 4",
    ):
        assert line in error
    assert "track" not in error.split("hint")[0]
    assert "steps would" not in error
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_fewer_steps_than_are_done_are_refused(whole: Path) -> None:
    process = start("--resume", str(whole), "--steps", "2")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "steps = 2, but 3 are done already" in error


def test_a_run_whose_tasks_changed_is_refused(world: Path, whole: Path) -> None:
    instruction = world / "train" / "make-berry" / "instruction.md"
    text = instruction.read_text()
    instruction.write_text("Make a directory named cherry.\n")
    try:
        process = start("--resume", str(whole))
        error = process.communicate(timeout=60)[1]
    finally:
        instruction.write_text(text)
    assert process.returncode == 1
    assert "tasks make-berry changed since the run began" in error
    assert (whole / "summary.json").exists()


OWNER = """
import asyncio
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider

async def main():
    provider = BubblewrapProvider()
    boxes = await asyncio.gather(*(provider.create(SandboxSpec("t", host_userland=True)) for _ in range(20)))
    for box in boxes:
        await box.exec("for i in 1 2; do setsid sleep 774.25 >/dev/null 2>&1 & done", timeout_s=20)
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def sleepers() -> int:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue
    return lines.count(b"sleep\x00774.25\x00")


def test_the_next_runs_start_removes_20_sandboxes_with_2_daemons_each_of_a_killed_process(
    world: Path, state: Path
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], env={**os.environ, **VARIABLES}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        (folder,) = [path for path in (state / "owners").iterdir() if path.name.startswith(f"{owner.pid}-")]
        assert wait_until(lambda: sleepers() == 40)
    finally:
        owner.kill()
        owner.wait()
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 20
    process = start(*flags(world, steps=0), "--run-dir", str(world / "after-a-kill"))
    error = process.communicate(timeout=100)[1]
    assert process.returncode == 0, error
    assert sleepers() == 0
    assert list((state / "owners").iterdir()) == []
    assert str(state) not in Path("/proc/self/mountinfo").read_text()
    assert not list(Path("/sys/fs/cgroup").rglob(f"termrl-{folder.name}"))


@pytest.fixture
def busy(world: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], Path, list[int]]]:
    """A run in its steps, with sandboxes up: (process, run folder, the processes below it)."""
    run = world / f"busy-{request.node.name[:40]}"
    process = start(*flags(world, steps=500, training__lr=1e-6), "--run-dir", str(run))
    try:
        below: list[int] = []

        def is_busy() -> bool:
            assert process.poll() is None, process.communicate()[1]
            below[:] = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            return len(below) > 6 and any(r["step"] for r in read_jsonl(run / "metrics.jsonl"))

        assert wait_until(is_busy)
        yield process, run, below
    finally:
        process.kill()
        process.communicate()


def test_every_process_of_a_run_dies_with_it(busy: tuple[subprocess.Popen[str], Path, list[int]]) -> None:
    process, _, below = busy
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(psutil.pid_exists(pid) and _lives(pid) for pid in below), 10)


HANGING = """
import sys, threading
import termrl.training.local
from termrl.cli import main
from termrl.engine.transformers import EmbeddedEngine

plain, turns = EmbeddedEngine.generate, 0

def generate(self, requests, **options):
    global turns
    turns += 1
    if turns > 3:
        threading.Event().wait()
    return plain(self, requests, **options)

EmbeddedEngine.generate = generate
termrl.training.local._CLOSE_S = 2.0
main(["train", *sys.argv[1:]])
"""


def test_an_engine_that_hangs_ends_the_run_which_can_be_resumed(world: Path, state: Path) -> None:
    run = world / "hanging"
    settings = [*flags(world, steps=2, episode__max_turns=1), "--stop.engine_s", "1", "--run-dir", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *settings], env={**os.environ, **VARIABLES}, stderr=subprocess.PIPE, text=True
    )
    try:
        error = process.communicate(timeout=110)[1]
    finally:
        process.kill()
    assert process.returncode == 1, error
    assert "the engine does not answer any more (the engine gave no turn in 1 s)" in error
    assert f"train --resume {run}" in error
    assert list((state / "owners").iterdir()) == []
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert "does not answer" in summary["stopped"]
    assert (summary["steps"], summary["eval_after"]) == (2, None)  # it was the last evaluation that hung
    resumed = start("--resume", str(run))
    error = resumed.communicate(timeout=110)[1]
    assert resumed.returncode == 0, error
    assert orjson.loads((run / "summary.json").read_bytes())["eval_after"] is not None


def test_injected_faults_are_counted_by_cause_and_never_rewarded(world: Path) -> None:
    from termrl.training.local import prepare, train

    made: list[FaultyProvider] = []
    for take in range(5):
        write_tasks(world / "more", ("cedar",), prefix=f"eval-{take}")
    overrides = {"evaluation.dir": world / "more", "rollout.samples": 16}
    config = load_settings(TrainConfig, flags=flags(world, **overrides)).config
    model, pools = prepare(config)
    with RunStore.create(world / "faulty", given="", resolved=to_toml(config)) as store:
        opened = faulty(0.4, 3, made)
        work = train(config, store, Silent(), model=model, pools=pools, open_sandboxes=opened)
        summary = asyncio.run(work)
        episodes = list(store.episodes())
    injected = {str(cause): count for cause, count in made[0].injected.items()}
    assert injected.keys() == {"sandbox_start", "sandbox_lost", "verifier_crash"}
    lost = Counter(e["cause"] for e in episodes if e["reward"] is None)
    again = Counter(loss["cause"] for e in episodes for loss in e["info"].get("lost", ()))
    assert lost + again == injected
    assert again.keys() == {"sandbox_start", "sandbox_lost"}, "those were played again"
    assert all(e["attempts"] == 1 + len(e["info"].get("lost", ())) <= 2 for e in episodes)
    trained_again = Counter(
        loss["cause"] for e in episodes if e["phase"] == "train" for loss in e["info"].get("lost", ())
    )
    assert Counter(summary["retried"]) == trained_again
    assert not any(e["trained"] or e["advantage"] for e in episodes if e["reward"] is None)
    assert summary["episodes"] == 32
    dropped = Counter(summary["dropped"])
    for part in summary["eval_dropped"].values():
        dropped.update(part)
    assert dropped == lost
    assert summary["tokens_trained"] == summary["tokens_captured"] - summary["tokens_masked"]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_sigterm_checkpoints_sweeps_and_exits_143(
    busy: tuple[subprocess.Popen[str], Path, list[int]], state: Path
) -> None:
    process, run, below = busy
    process.terminate()
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 143, error
    assert "Traceback" not in error
    assert f"--resume {run}" in error
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert summary["stopped"] == "interrupted"
    last = max(r["step"] for r in read_jsonl(run / "metrics.jsonl"))
    assert summary["steps"] == last
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[-1] == f"step-{last:06d}"
    assert not any(_lives(pid) for pid in below)
    assert list((state / "owners").iterdir()) == []


def test_ctrl_c_twice_ends_at_once_and_leaves_no_sandbox(
    busy: tuple[subprocess.Popen[str], Path, list[int]], state: Path
) -> None:
    process, run, below = busy
    # pending signals of one kind are one: send until it is gone
    assert wait_until(lambda: process.send_signal(signal.SIGINT) or process.poll() is not None, 20)
    error = process.communicate(timeout=20)[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "ended at once; go on with: " in error
    assert f"--resume {run}" in error
    assert wait_until(lambda: not any(_lives(pid) for pid in below), 10)
    assert list((state / "owners").iterdir()) == []
