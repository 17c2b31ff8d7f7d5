"""Trackers: the real libraries offline where they are installed, and a run that none of them can harm."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from termrl.config import TrainConfig
from termrl.errors import ConfigError, RunError
from termrl.runs.metrics import EvalScores, FamilyScore
from termrl.runs.trackers import QUEUED, TrackerWatcher, check_tracker
from termrl.settings import load_settings, to_toml

SOURCE = Path(__file__).parents[2] / "src"
NAMES = ("wandb", "tensorboard", "trackio")
SECRET = "5ec2e7" * 7  # of a key's length
SCORES = EvalScores({"make-dir": FamilyScore(6, 8), "copy-file": FamilyScore(1, 4)}, frozenset({"copy-file"}))

FOLLOW = """
import sys, time
from pathlib import Path
from termrl.config import TrainConfig
from termrl.errors import TermrlError
from termrl.runs.metrics import EvalScores, FamilyScore
from termrl.runs.trackers import check_tracker, tracking
from termrl.settings import load_settings

name, folder, first, last, then = sys.argv[1:]
config = load_settings(TrainConfig, flags=[f"--track.to={name}", "--track.project=suite"]).config
scores = EvalScores({"make-dir": FamilyScore(6, 8), "copy-file": FamilyScore(1, 4)}, frozenset({"copy-file"}))
try:
    check_tracker(name)
    again = int(first) > 1
    with tracking(config, Path(folder), resumed=again, warn=lambda line: print("warning:", line)) as (watcher,):
        watcher.started(Path(folder), steps=4, first_step=int(first))
        if first == "1":
            watcher.phase("evaluate", step=0, total=1)
            watcher.evaluated("before", scores)
        for step in range(int(first), int(last) + 1):
            watcher.phase("rollout", step=step, total=1)
            watcher.step(step, {"rollout/raw_reward": step / 8 + int(first) * 10, "train/tokens": 100 * step})
        if then == "hang":
            print("hanging", flush=True)
            time.sleep(60)
        watcher.finished({"eval_after": 0.75, "dropped": {}}, {})
except TermrlError as error:
    print(error.message, error.hint, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(name: str, folder: Path, first: int = 1, last: int = 3, then: str = "end") -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    offline = {"WANDB_MODE": "offline", "WANDB_API_KEY": SECRET, "TRACKIO_DIR": str(folder.parent / "trackio")}
    path = os.pathsep.join([str(SOURCE), *sys.path[1:]])
    return subprocess.Popen(
        [sys.executable, "-c", FOLLOW, name, str(folder), str(first), str(last), then],
        env={**os.environ, "PYTHONPATH": path, "HOME": str(folder.parent), **offline},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def follow(name: str, folder: Path, **arguments: Any) -> bool:
    """Track a short run in a process of its own; False if the library is missing, which must have been refused."""
    process = start(name, folder, **arguments)
    out, error = process.communicate(timeout=90)
    if importlib.util.find_spec(name) is None:
        assert process.returncode == 2, error
        assert f"pip install 'termrl[{name}]'" in error
        assert list(folder.iterdir()) == []
        return False
    assert process.returncode == 0, error
    assert "warning:" not in out
    return True


def tensorboard_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def tensorboard_points(folder: Path) -> dict[str, dict[int, float]]:
    events = tensorboard_events(folder)
    return {tag: {p.step: p.value for p in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    data, at, payload = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        payload += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(payload)
            yield record
            payload = b""


def wandb_points(folder: Path) -> dict[str, dict[int, float]]:
    points: dict[str, dict[int, float]] = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for name, value in row.items():
                    if name != "step" and not name.startswith("_"):
                        points.setdefault(name, {})[row["step"]] = value
    return points


def trackio_points(folder: Path) -> dict[str, dict[int, float]]:
    code = (
        "import json, sys\nfrom trackio.sqlite_storage import SQLiteStorage as S\n"
        "assert S.get_runs('suite') == [sys.argv[1]], S.get_runs('suite')\n"
        "print(json.dumps(S.get_logs('suite', sys.argv[1])))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(folder.parent / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    rows = subprocess.run(
        [sys.executable, "-c", code, folder.name], env=environment, check=True, capture_output=True, text=True
    ).stdout
    points: dict[str, dict[int, float]] = {}
    for row in json.loads(rows.splitlines()[-1]):
        for name, value in row.items():
            if "/" in name:
                points.setdefault(name, {})[row["step"]] = value
    return points


READERS: dict[str, Callable[[Path], dict[str, dict[int, float]]]] = {
    "wandb": wandb_points,
    "tensorboard": tensorboard_points,
    "trackio": trackio_points,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_gets_every_figure_at_its_step(name: str, tmp_path: Path) -> None:
    if not follow(name, tmp_path / "run"):
        return
    points = READERS[name](tmp_path / "run")
    assert points == {
        "rollout/raw_reward": {1: 10.125, 2: 10.25, 3: 10.375},
        "train/tokens": {1: 100.0, 2: 200.0, 3: 300.0},
        "eval/pass_rate": {0: 0.75},
        "eval/untrained_pass_rate": {0: 0.25},
        "eval/family/make-dir": {0: 0.75},
        "eval/family/copy-file": {0: 0.25},
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if not follow(name, folder):
        return
    assert follow(name, folder, first=3, last=4)
    rewards = READERS[name](folder)["rollout/raw_reward"]
    assert rewards.keys() == {1, 2, 3, 4}
    assert rewards[3] == 30.375  # what the resumed run did again is what counts
    if name == "wandb":
        ids = {path.name.rsplit("-", 1)[1] for path in (folder / "wandb").glob("offline-run-*")}
        assert len(ids) == 1
    if name == "tensorboard":
        assert [p.step for p in tensorboard_events(folder).Scalars("train/tokens")] == [1, 2, 3, 4]


def test_tensorboard_shows_the_settings_but_not_those_of_the_sandbox(tmp_path: Path) -> None:
    if not follow("tensorboard", tmp_path / "run"):
        return
    events = tensorboard_events(tmp_path / "run")
    (text,) = events.Tensors("config")
    assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"
    sent = json.loads(text.tensor_proto.string_val[0].removeprefix(b"```json\n").removesuffix(b"\n```"))
    assert sent["training"]["lr"] == TrainConfig().training.lr
    assert sent["sandbox"] == {"backend": "bubblewrap"}
    assert sent.keys() == TrainConfig.model_fields.keys() - {"run_dir", "track"}


@pytest.mark.parametrize("name", NAMES)
def test_credentials_are_in_no_file_of_the_run(name: str, tmp_path: Path) -> None:
    follow(name, tmp_path / "run")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_wandb_leaves_no_process_when_the_run_is_killed(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        assert not follow("wandb", tmp_path / "run")
        return
    process = start("wandb", tmp_path / "run", then="hang")
    assert process.stdout is not None
    while "hanging" not in (line := process.stdout.readline()):
        assert line, process.communicate()[1]
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert psutil.wait_procs(children, timeout=20)[1] == []


def test_wandb_without_a_login_is_refused_before_the_run(tmp_path: Path) -> None:
    code = "import sys\nfrom termrl.cli import main\nmain(['train', '--track', 'wandb', '--run-dir', sys.argv[1]])"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TERMRL_"))}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path[1:]])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "termrl: error: track.to: wandb" in done.stderr
    assert "  hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_refused_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"track\.to: {name} needs the package {name}") as caught:
        check_tracker(name)
    assert caught.value.hint == f"pip install 'termrl[{name}]'"


def test_an_unknown_tracker_and_a_key_in_the_settings_are_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigError, match=r"command line: track\.to: input should be 'none', 'wandb'"):
        load_settings(TrainConfig, flags=["--track.to=mlflow"])
    with pytest.raises(ConfigError, match=r"TERMRL_TRACK__API_KEY: track\.api_key: unknown key") as caught:
        load_settings(TrainConfig, environ={"TERMRL_TRACK__API_KEY": SECRET})
    assert SECRET not in caught.value.message


def test_where_figures_go_is_saved_with_the_run() -> None:
    config = load_settings(TrainConfig, flags=["--track.to=wandb", "--track.prometheus-port=9100"]).config
    assert '[track]\nto = "wandb"\nproject = "termrl"\nprometheus_port = 9100' in to_toml(config)


class FakeTracker:
    """Keeps what it gets; ``spoil`` is called before each record."""

    def __init__(self, spoil: Callable[[int], None] = lambda step: None) -> None:
        self.spoil = spoil
        self.calls: list[tuple[Any, ...]] = []

    def begin(self, first_step: int) -> None:
        self.calls.append(("begin", first_step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.spoil(step)
        self.calls.append(("log", step, dict(values)))

    def close(self, summary: Mapping[str, Any] | None) -> None:
        self.calls.append(("close", summary))


def test_calls_come_in_order_and_an_evaluation_at_the_step_it_was_made_after() -> None:
    tracker, warnings = FakeTracker(), []
    with TrackerWatcher("fake", lambda: tracker, warn=warnings.append) as watcher:
        watcher.started(Path("run"), steps=5, first_step=3)
        watcher.phase("rollout", step=3, total=2)
        watcher.step(3, {"train/tokens": 7})
        watcher.phase("evaluate", step=3, total=2)
        watcher.evaluated("at step 3", EvalScores({"make-dir": FamilyScore(1, 2)}))
        watcher.finished({"steps": 3}, {})
    assert tracker.calls == [
        ("begin", 3),
        ("log", 3, {"train/tokens": 7.0}),
        ("log", 3, {"eval/pass_rate": 0.5, "eval/family/make-dir": 0.5}),
        ("close", {"steps": 3}),
    ]
    assert warnings == []


def test_a_run_that_fails_is_closed_without_a_summary() -> None:
    tracker = FakeTracker()
    with (
        pytest.raises(RunError, match="no verdict"),
        TrackerWatcher("fake", lambda: tracker, warn=pytest.fail) as watcher,
    ):
        watcher.step(1, {})
        raise RunError("no verdict")
    assert tracker.calls[-1] == ("close", None)


@pytest.mark.parametrize("error", [OSError("the network\nis down"), SystemExit(1)])
def test_a_tracker_that_fails_in_mid_run_warns_once_and_is_asked_again(error: BaseException) -> None:
    def fail(step: int) -> None:
        if step in (2, 3):
            raise error

    tracker, warnings = FakeTracker(fail), []
    with TrackerWatcher("fake", lambda: tracker, warn=warnings.append) as watcher:
        for step in (1, 2, 3, 4):
            watcher.step(step, {"train/tokens": step})
        watcher.finished({}, {})
    assert [call[1] for call in tracker.calls if call[0] == "log"] == [1, 4]
    assert tracker.calls[-1] == ("close", {})
    assert len(warnings) == 2
    assert warnings[0].startswith(f"fake: failed, the run goes on: {type(error).__name__}")
    assert "\n" not in warnings[0]
    assert warnings[1] == "fake: 2 of 5 calls failed; metrics.jsonl is whole"


def test_a_tracker_that_hangs_holds_neither_the_run_nor_its_end_nor_memory() -> None:
    released = threading.Event()

    def hang(step: int) -> None:
        released.wait()

    tracker, warnings = FakeTracker(hang), []
    started = time.monotonic()
    with TrackerWatcher("fake", lambda: tracker, warn=warnings.append, close_s=0.3) as watcher:
        for step in range(QUEUED + 50):
            watcher.step(step, {"train/tokens": step})
    assert time.monotonic() - started < 2
    assert warnings == [
        "fake: takes nothing any more",
        "fake: has not closed within 0.3 s and is left; metrics.jsonl is whole",
    ]
    released.set()


def test_a_tracker_that_does_not_open_is_an_error_before_the_first_step() -> None:
    def refuse() -> FakeTracker:
        raise PermissionError("no such project")

    with (
        pytest.raises(RunError, match="fake: does not open: PermissionError: no such project") as caught,
        TrackerWatcher("fake", refuse, warn=pytest.fail),
    ):
        pytest.fail("entered")
    assert caught.value.hint is not None

    released = threading.Event()

    def hang() -> FakeTracker:
        released.wait()
        return FakeTracker()

    with (
        pytest.raises(RunError, match=r"did not open within 0\.1 s"),
        TrackerWatcher("fake", hang, warn=pytest.fail, open_s=0.1),
    ):
        pytest.fail("entered")
    released.set()
