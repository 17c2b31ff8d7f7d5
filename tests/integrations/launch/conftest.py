from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"
_OURS = ("OPENENV_", "WANDB_", "MILES_", "AGENT_", "TERMRL_", "HF_")

Termrl = Callable[..., subprocess.CompletedProcess[str]]


def environ(**more: str) -> dict[str, str]:
    """This process's variables without those that a launch reads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**kept, "PYTHONPATH": str(SOURCE), **more}


@pytest.fixture
def termrl(tmp_path: Path) -> Termrl:
    """Run ``termrl launch`` to its end, in an empty folder."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()

    def run(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "termrl", "launch", *map(str, arguments)],
            env=environ(**more),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
