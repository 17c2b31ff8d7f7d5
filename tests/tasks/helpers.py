"""Task folders made in a temporary directory, and test.sh run on plain bash with its two paths rewritten."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

MINIMAL = """\
schema_version = "1.4"
[metadata]
termrl_userland = "host"
[environment]
network_mode = "no-network"
"""

PASSING = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"


def write_task(
    folder: Path,
    *,
    toml: str | None = MINIMAL,
    instruction: str | bytes | None = "Do it.\n",
    test: str | bytes | None = PASSING,
    files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """A task folder; ``None`` leaves a file out."""
    named = {"task.toml": toml, "instruction.md": instruction, "tests/test.sh": test, **(files or {})}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in named.items():
        if content is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


class PlainMachine:
    """``/app`` and ``/logs/verifier`` of a task as two folders of this host."""

    def __init__(self, task: Path, scratch: Path) -> None:
        self.task = task
        self.app = scratch / "app"
        self.logs = scratch / "logs"
        shutil.copytree(task / "environment", self.app)
        self.logs.mkdir()

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        text = script.replace("/app", str(self.app)).replace("/logs/verifier", str(self.logs))
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "TIME_STYLE": "+"}
        cwd = self.app if self.app.is_dir() else self.logs
        return subprocess.run(["bash", "-c", text], cwd=cwd, env=env, capture_output=True, text=True, timeout=20)

    @property
    def solution(self) -> str:
        return (self.task / "solution" / "solve.sh").read_text()

    def reward(self, *scripts: str) -> tuple[str, str]:
        """Run the scripts, which must succeed, then the tests: (what reward.txt holds, what the tests printed)."""
        tests = (self.task / "tests" / "test.sh").read_text()
        # One process for all of them: this runs some thousand times.
        done = self.run("\n".join([*(f"(\n{script}\n) >&2 || exit 99" for script in scripts), tests]))
        assert done.returncode == 0, done.stderr
        assert done.stderr == "" or scripts
        return (self.logs / "reward.txt").read_text().strip(), done.stdout.strip()
