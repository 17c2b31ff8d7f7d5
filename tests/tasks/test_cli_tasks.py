"""``termrl tasks`` as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from termrl.cli.tasks import app
from termrl.errors import TaskError
from tests.tasks.helpers import write_task


def _run(*tokens: str) -> None:
    app(list(tokens), result_action="return_value")


def test_generate_then_list_then_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = str(tmp_path / "suite")
    _run("generate", suite, "--families", "make-dir,sort-file", "--per-family", "2", "--split", "eval", "--seed", "3")
    assert "4 tasks in" in capsys.readouterr().out
    _run("list", suite)
    listed = capsys.readouterr().out
    assert all(f"{family}-eval-00{i}" in listed for family in ("make-dir", "sort-file") for i in range(2))
    assert "4 tasks, 2 families" in listed
    _run("show", suite, "make-dir-eval-001")
    shown = capsys.readouterr().out
    assert shown.startswith("Make a directory named ")
    assert "tests/test.sh" in shown
    assert "no-network" in shown


def test_generate_without_families_is_level_1_and_all_is_all(tmp_path: Path) -> None:
    _run("generate", str(tmp_path / "one"), "--per-family", "1")
    _run("generate", str(tmp_path / "all"), "--per-family", "1", "--families", "all")
    names = {name: {p.name for p in (tmp_path / name).iterdir()} for name in ("one", "all")}
    assert names["one"] < names["all"]
    assert "count-lines-train-000" in names["all"] - names["one"]


def test_list_says_what_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "good", toml='[metadata]\ntermrl_userland = "host"\n[agent]\ncolour = 1')
    write_task(tmp_path / "bad [x]", toml=None)
    with pytest.raises(TaskError, match="1 of 2 tasks are broken"):
        _run("list", str(tmp_path))
    _run("list", str(tmp_path), "--skip-broken")
    out = capsys.readouterr().out
    assert f"broken {tmp_path}/bad [x]: no task.toml" in out
    assert "unknown key agent.colour" in out


def test_show_names_an_unknown_task(tmp_path: Path) -> None:
    write_task(tmp_path / "good")
    with pytest.raises(TaskError, match="no task named other"):
        _run("show", str(tmp_path), "other")


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys; from termrl.cli.tasks import app; app(['--help'], result_action='return_value');"
        "print(sorted({'pydantic', 'torch', 'transformers', 'openai', 'pyarrow', 'starlette'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "generate" in done.stdout
