"""``termrl attack`` as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrl.sandboxes.sweep import remains

TOML = '[metadata]\ntermrl_userland = "host"\n[environment]\nnetwork_mode = "no-network"\n'
SOUND = '[ "$(cat answer.txt 2>/dev/null)" = x1 ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n'
EVERYWHERE = '[ -n "$(ls)" ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n'


def write_task(folder: Path, name: str, test: str) -> Path:
    for path, text in {
        "task.toml": TOML,
        "instruction.md": "Write x1 to answer.txt.\n",
        "tests/test.sh": test,
        "solution/solve.sh": "echo x1 > answer.txt\n",
    }.items():
        target = folder / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def command(*arguments: object, state: Path) -> tuple[list[str], dict[str, str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return [sys.executable, "-m", "termrl", "attack", *map(str, arguments), f"--sandbox.settings.state={state}"], env


def attack(*arguments: object, state: Path) -> subprocess.CompletedProcess[str]:
    argv, env = command(*arguments, state=state)
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder that other users may walk into (sandboxes of root run as one)."""
    folder = Path(tempfile.mkdtemp(prefix="termrl-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_task_that_holds_gives_0_and_one_that_can_be_cheated_1_with_the_attack_named(
    tmp_path: Path, state: Path
) -> None:
    write_task(tmp_path, "sound", SOUND)
    done = attack(tmp_path, "--only", "reward", "--json", state=state)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["holds"] and found["tasks"][0]["nop"] == 0.0 and found["tasks"][0]["oracle"] == 1.0
    assert all(result["outcome"] == "failed" for result in found["tasks"][0]["results"])

    write_task(tmp_path, "cheated", EVERYWHERE)
    done = attack(tmp_path, "--only=odd-names,nothing", state=state)
    assert done.returncode == 1, done.stderr
    assert "GOT THROUGH" in done.stdout and "odd-names" in done.stdout


def test_a_task_that_is_not_sound_is_not_tried_and_says_why(tmp_path: Path, state: Path) -> None:
    write_task(tmp_path, "free", "echo 1 > /logs/verifier/reward.txt\n")
    done = attack(tmp_path, "--only", "nothing", "--json", state=state)
    assert done.returncode == 1
    (task,) = json.loads(done.stdout)["tasks"]
    assert "untouched" in task["unfit"] and task["results"] == []


def test_bad_arguments_are_named(tmp_path: Path, state: Path) -> None:
    done = attack(write_task(tmp_path, "sound", SOUND), "--only", "curlrcc", state=state)
    assert done.returncode == 2 and "curlrcc" in done.stderr and "curlrc" in done.stderr


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, state: Path) -> None:
    write_task(tmp_path, "slow", "sleep 2\n" + SOUND)
    argv, env = command(tmp_path, "-n", 2, state=state)
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        for _ in range(100):
            time.sleep(0.1)
            if list(state.glob("owners/*/s*")):
                break
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
        assert running.returncode == 130, said.decode()
    assert remains(state) == [] and list(state.glob("owners/*")) == []
