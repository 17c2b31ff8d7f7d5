"""What is started is ended, by its recorded id, and nothing else is; with real processes, daemons among them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from termrl.integrations.miles.launch.process import RECORDS, Records, clean_up
from termrl.runs.files import append_jsonl, read_jsonl
from tests.integrations.launch.conftest import environ
from tests.integrations.launch.fake_miles import fake_miles, rows, settings

Termrl = Callable[..., subprocess.CompletedProcess[str]]

DAEMON = "sleep 1000.25"
SKIPPED = tuple(f"--skip-preflight={name}" for name in ("environment", "gpus"))


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """The words of a launch on the fake checkout."""
    root = fake_miles(tmp_path)
    prompt_data = rows(tmp_path / "train.jsonl", ["one", "two"])
    return [*settings(tmp_path, root, prompt_data), "--run-dir", str(tmp_path / "run"), *SKIPPED]


@pytest.fixture
def foreign() -> Iterator[psutil.Process]:
    """A process of somebody else that looks like one of ours, and must survive."""
    process = subprocess.Popen(DAEMON.split(), start_new_session=True)
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


@contextmanager
def started(tmp_path: Path, given: list[str], *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose training stays until it is ended."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "termrl", "launch", "miles", "qwen3-8b", *given, "--set", "env.PLAY=stay", *more],
        env=environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: (tmp_path / "seen.json").exists())
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()
        clean_up(tmp_path / "run", grace_s=1)


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.05)


def ours(tmp_path: Path) -> list[psutil.Process]:
    """What runs of a launch: told by the variable that everything below it inherits."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SEEN") == str(tmp_path / "seen.json") and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def seen(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "seen.json").read_text())


def test_first_launch_downloads_converts_and_trains(tmp_path: Path, given: list[str], termrl: Termrl) -> None:
    done = termrl("miles", "qwen3-8b", *given, "--", "--extra", "1", HF_TOKEN="inherited")
    assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in done.stderr.splitlines() if "begins" in line] == [
        "download:",
        "convert:",
        "train:",
    ]
    assert "step 1 of 1" in done.stdout
    assert "step 1 of 1" in (tmp_path / "run" / "logs" / "train.log").read_text()
    trained = seen(tmp_path)
    # the model's own words come first, and no shell saw their brackets
    assert trained["argv"][:4] == ["--num-layers", "4", "--moe-layer-freq", "[0]*1+[1]*3"]
    assert trained["argv"][-2:] == ["--extra", "1"]
    assert trained["env"]["OPENENV_RUN_ID"] == "run"
    assert trained["env"]["HF_TOKEN"] == "inherited"
    converted = (tmp_path / "models" / "Qwen3-8B_torch_dist" / "argv").read_text().splitlines()
    assert converted[:2] == ["--num-layers", "4"]
    assert (tmp_path / "run" / "profile.toml").is_file()
    assert "inherited\n" not in (tmp_path / "run" / "launch.sh").read_text()


def test_second_launch_leaves_out_what_is_there(tmp_path: Path, given: list[str], termrl: Termrl) -> None:
    assert termrl("miles", "qwen3-8b", *given).returncode == 0
    again = termrl("miles", "qwen3-8b", *given)
    assert again.returncode == 0, again.stderr
    assert "download: left out" in again.stderr and "convert: left out" in again.stderr


def test_failed_step_ends_the_launch_with_its_code(tmp_path: Path, given: list[str], termrl: Termrl) -> None:
    done = termrl("miles", "qwen3-8b", *given, "--set", "env.PLAY=7")
    assert done.returncode == 7
    assert "train: ended with code 7" in done.stderr
    unknown = termrl("miles", "qwen3-8b", *given, "--set", "model.megatron_model_type=no-such-model")
    assert unknown.returncode == 1
    assert "model_args_utils.py no-such-model: no model args script\n" in unknown.stderr


def test_daemons_that_training_left_behind_are_gone_when_it_ends(
    tmp_path: Path, given: list[str], termrl: Termrl, foreign: psutil.Process
) -> None:
    assert termrl("miles", "qwen3-8b", *given).returncode == 0
    assert ours(tmp_path) == []
    assert foreign.is_running()
    recorded = list(read_jsonl(tmp_path / "run" / RECORDS))
    assert {record["step"] for record in recorded} == {"download", "convert", "train"} or len(recorded) >= 2
    assert foreign.pid not in {record["pid"] for record in recorded}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_everything_that_was_started_and_nothing_else(
    number: signal.Signals, tmp_path: Path, given: list[str], foreign: psutil.Process
) -> None:
    with started(tmp_path, given) as launcher:
        assert len(ours(tmp_path)) >= 3
        launcher.send_signal(number)
        assert launcher.wait(30) == 130
        assert ours(tmp_path) == []
        assert foreign.is_running()


def test_stop_ends_what_a_killed_launcher_left(
    tmp_path: Path, given: list[str], termrl: Termrl, foreign: psutil.Process
) -> None:
    with started(tmp_path, given) as launcher:
        wait_for(lambda: len(list(read_jsonl(tmp_path / "run" / RECORDS))) >= 3)
        launcher.kill()
        launcher.wait()
        left = ours(tmp_path)
        assert len(left) >= 3
        refused = termrl("miles", "qwen3-8b", *given)
        assert "processes of an earlier launch still run" in refused.stderr
        done = termrl("stop", tmp_path / "run")
        assert done.returncode == 0, done.stderr
        assert ours(tmp_path) == []
        assert foreign.is_running()
        assert "0 processes were ended" in termrl("stop", tmp_path / "run").stderr


def test_pid_that_is_used_again_is_not_mistaken(tmp_path: Path, foreign: psutil.Process) -> None:
    run = tmp_path / "run"
    run.mkdir()
    stat = Path(f"/proc/{foreign.pid}/stat").read_text()
    began = int(stat.rpartition(")")[2].split()[19])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    here = f"{os.uname().nodename} {boot}"
    record = {"kind": "process", "machine": here, "pid": foreign.pid, "began": began - 1, "step": "train"}
    append_jsonl(run / RECORDS, [record, {**record, "began": began, "machine": "elsewhere"}])
    assert clean_up(run, grace_s=0.5) == 0
    assert foreign.is_running()
    append_jsonl(run / RECORDS, [{**record, "began": began}])
    assert clean_up(run, grace_s=0.5) == 1
    assert foreign.status() == psutil.STATUS_ZOMBIE


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = subprocess.Popen(
        ["bash", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"], stdout=subprocess.PIPE
    )
    assert deaf.stdout is not None and deaf.stdout.readline() == b"deaf\n"
    (tmp_path / "run").mkdir()
    Records(tmp_path / "run").add("train", [psutil.Process(deaf.pid)])
    assert clean_up(tmp_path / "run", grace_s=0.5) >= 1
    assert deaf.wait(5) == -signal.SIGKILL
    deaf.stdout.close()


def test_resume_goes_on_with_the_settings_of_the_run(tmp_path: Path, given: list[str], termrl: Termrl) -> None:
    run = tmp_path / "run"
    assert termrl("miles", "qwen3-8b", *given, "--set", "rollout.num_rollout=9", "--", "--first", "1").returncode == 0
    refused = termrl("miles", "--resume", run, *SKIPPED)
    assert "no checkpoint to resume from" in refused.stderr
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("8")
    (tmp_path / "seen.json").unlink()
    done = termrl("miles", "--resume", run, *SKIPPED, "--set", "save.save_interval=3", "--", "--more", "1")
    assert done.returncode == 0, done.stderr
    words = seen(tmp_path)["argv"]
    assert words[words.index("--num-rollout") + 1] == "9"
    assert words[words.index("--save-interval") + 1] == "3"
    assert words[-4:] == ["--first", "1", "--more", "1"]
    another = termrl("miles", "qwen3-8b", *given)
    assert "holds a run already" in another.stderr


def test_stop_of_a_folder_without_a_launch_is_refused(tmp_path: Path, termrl: Termrl) -> None:
    assert termrl("stop", tmp_path).returncode == 2


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_supervised_command_leaves_no_daemon(number: signal.Signals | None, tmp_path: Path) -> None:
    script = "(setsid sleep 1000.25 &) ; echo $$ > up; " + ("exit 5" if number is None else "sleep 1000.25")
    command = [sys.executable, "-m", "termrl.integrations.miles.launch.supervise", "bash", "-c", script]
    process = subprocess.Popen(command, env=environ(SEEN=str(tmp_path / "seen.json")), cwd=tmp_path)
    wait_for(lambda: (tmp_path / "up").exists())
    if number is not None:
        process.send_signal(number)
    assert process.wait(20) == (5 if number is None else 130)
    assert ours(tmp_path) == []
