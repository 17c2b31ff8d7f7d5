"""``[images]`` of a configuration reaches every verb that makes containers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker import IMAGE
from tests.environment.server.served import SECRET, write_task

SOURCE = Path(__file__).parents[2] / "src"
# No registry has it, and none is asked: an alias says what it stands for.
ABSENT = "termrl-test/absent:1"


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder that other users may walk into."""
    with tempfile.TemporaryDirectory(prefix="termrl-test-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    "verb",
    [
        ("validate", "{tasks}", "-n", "1", "--repeat", "1"),
        ("attack", "{tasks}", "--only", "prewritten-reward"),
        ("doctor", "--image", ABSENT, "--check", "exit-code"),
    ],
    ids=lambda verb: verb[0],
)
def test_an_alias_of_the_configuration_is_used(
    verb: tuple[str, ...], tmp_path: Path, state: Path, docker_required: None
) -> None:
    task = write_task(tmp_path / "tasks", "one")
    (task / "task.toml").write_text((task / "task.toml").read_text().replace("debian:12-slim", ABSENT))
    (task / "solution").mkdir()
    (task / "solution" / "solve.sh").write_text(f"echo {SECRET} > answer.txt\n")
    config = tmp_path / "images.toml"
    config.write_text(f'[images]\npull_attempts = 1\n"{ABSENT}" = "{IMAGE}"\n')
    arguments = [part.format(tasks=tmp_path / "tasks") for part in verb]
    ended = subprocess.run(
        [sys.executable, "-m", "termrl", *arguments, "--sandbox", "docker", "-c", str(config)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TERMRL_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
