"""``termrl validate`` as a user calls it, also when it is killed or interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from termrl.runs.files import read_jsonl
from termrl.sandboxes.sweep import remains, sweep
from tests.cli.test_main import SOURCE, termrl
from tests.validation.tasks import CHECK, SOLVE, add, add_all_kinds

SLOW = "sleep 0.3\n" + CHECK


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "termrl", "validate", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def made(folder: Path) -> Counter[tuple[str, str, int]]:
    attempts = read_jsonl(folder / "r.json.attempts.jsonl")
    return Counter((found["task_id"], found["kind"], found["round"]) for found in attempts)


def test_all_sound_is_exit_code_0_and_the_report_says_what_was_done(tmp_path: Path) -> None:
    for name in ("one", "two"):
        add(tmp_path / "tasks", name)
    done = termrl("validate", "tasks", "-n", "2", "--repeat", "3", "-o", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 sound in" in done.stdout and "1 1 1" in done.stdout
    report = json.loads((tmp_path / "r.json").read_bytes())
    assert (report["sound"], report["complete"], report["sandbox"]) == (True, True, "bubblewrap")
    assert report["results"]["one"]["oracle"] == [1, 1, 1] and report["results"]["two"]["nop"] == [0, 0, 0]


def test_one_unsound_task_is_exit_code_1_and_shown_with_its_log(tmp_path: Path) -> None:
    wanted = add_all_kinds(tmp_path / "tasks")
    done = termrl("validate", "tasks", "-n", "8", "--repeat", "1", "--retries", "0", cwd=tmp_path)
    assert done.returncode == 1
    for name, status in wanted.items():
        assert f"{name}: {status.replace('_', ' ')}" in done.stdout or status == "sound"
    assert "  | not done" in done.stdout and "2 sound, 1 oracle fails" in done.stdout
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tasks"]


def test_json_goes_to_stdout_alone(tmp_path: Path) -> None:
    add(tmp_path / "tasks", "one")
    add(tmp_path / "tasks", "two", solve="true\n")
    done = termrl("validate", "tasks", "--repeat", "1", "--json", "--exclude", "two", cwd=tmp_path)
    assert done.returncode == 0 and list(json.loads(done.stdout)["results"]) == ["one"]
    done = termrl("validate", "tasks", "--repeat", "1", "--json", "--include", "t*", cwd=tmp_path)
    assert done.returncode == 1 and json.loads(done.stdout)["counts"] == {"oracle_fails": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere: no such folder"),
        (("tasks", "--include", "x"), "no task matches"),
        (("tasks", "-n", "0"), "-n 0: at least 1"),
        (("tasks", "--resume"), "--resume needs -o"),
        (("tasks", "--sandbox", "bubblewarp", "-o", "r.json"), "bubblewarp"),
        (("tasks", "--sandbox.settings.nope", "1"), "nope"),
        (("tasks", "--repaet", "1"), "repaet"),
    ],
)
def test_bad_input_is_exit_code_2_and_makes_nothing(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    add(tmp_path / "tasks", "one")
    done = termrl("validate", *arguments, cwd=tmp_path)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tasks"]


def test_a_killed_study_is_resumed_and_makes_only_what_is_missing(tmp_path: Path, state: Path) -> None:
    for number in range(6):
        add(tmp_path / "tasks", f"task-{number}", test=SLOW)
    arguments = ("tasks", "-n", "2", "--repeat", "2", "-o", "r.json")
    process = start(*arguments, cwd=tmp_path)
    wait_for(lambda: made(tmp_path).total() >= 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = made(tmp_path)
    assert 5 <= before.total() < 24 and not (tmp_path / "r.json").exists()
    again = termrl("validate", *arguments, cwd=tmp_path)
    assert again.returncode == 2 and "--resume goes on" in again.stderr
    done = termrl("validate", *arguments, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{before.total()} attempts are kept from before, {24 - before.total()} are to be made" in done.stderr
    after = made(tmp_path)
    assert len(after) == 24 and set(after.values()) == {1}
    assert json.loads((tmp_path / "r.json").read_bytes())["sound"]
    sweep(state)
    assert remains(state) == []


def test_resuming_tries_again_what_changed_and_leaves_the_rest(tmp_path: Path) -> None:
    add(tmp_path / "tasks", "good")
    add(tmp_path / "tasks", "bad", solve="true\n")
    arguments = ("validate", "tasks", "--repeat", "1", "-o", "r.json")
    assert termrl(*arguments, cwd=tmp_path).returncode == 1
    assert "4 attempts are kept" in termrl(*arguments, "--resume", cwd=tmp_path).stderr
    add(tmp_path / "tasks", "bad", solve=SOLVE)
    done = termrl(*arguments, "--resume", cwd=tmp_path)
    assert (done.returncode, "2 attempts are kept from before, 2 are to be made" in done.stderr) == (0, True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_keeps_what_was_tried_and_leaves_no_sandbox(
    tmp_path: Path, state: Path, number: signal.Signals, code: int
) -> None:
    for index in range(4):
        add(tmp_path / "tasks", f"task-{index}", test=SLOW)
    process = start("tasks", "-n", "2", "--repeat", "3", "-o", "r.json", cwd=tmp_path)
    wait_for(lambda: made(tmp_path).total() >= 7)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "--resume goes on with it" in err and "not every task was tried" in out
    report = json.loads((tmp_path / "r.json").read_bytes())
    assert (report["complete"], report["sound"]) == (False, False)
    assert [found["status"] for found in report["results"].values()] == ["sound"]
    assert remains(state) == []
    assert termrl("validate", "tasks", "--repeat", "3", "-o", "r.json", "--resume", cwd=tmp_path).returncode == 0
