"""``.harborignore``: gitignore's rules, inherited, within tests/ and solution/."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from termrl.tasks import excluded_paths

FILES = (
    "a.txt",
    "a.log",
    "keep.log",
    "build/x.txt",
    "build/keep.txt",
    "sub/a.log",
    "sub/deep/b.txt",
    "sub/build/y",
    "[z].txt",
)

RULES = [
    "*.log\n!keep.log\n",
    "build/\n",
    "/build\n",
    "build/*\n!build/keep.txt\n",
    "build/\n!build/keep.txt\n",
    "sub/**/b.txt\n",
    "**/build\n",
    "sub/**\n",
    "# a comment\n\n  \n\\[z\\].txt\n",
    "[ab].txt\n",
    "[!a].txt\n",
    "?.txt\n",
    "sub/deep\n",
    "*\n!a.txt\n!*/\n",
    "a.txt   \n",
    "/*.txt\n",
    "!a.txt\na.*\n",
]


def _make(folder: Path, rules: dict[str, str]) -> None:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    for name, text in rules.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("rules", RULES)
def test_the_kept_files_are_those_that_git_keeps(tmp_path: Path, rules: str) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is the reference here and is not installed")
    _make(tmp_path, {".harborignore": rules, "sub/.harborignore": "!a.log\n"})
    listing = ["git", "ls-files", "--others", "--exclude-per-directory=.harborignore"]
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    done = subprocess.run(listing, cwd=tmp_path, check=True, capture_output=True, text=True)
    expected = {line for line in done.stdout.splitlines() if not line.endswith(".harborignore")}
    shutil.rmtree(tmp_path / ".git")
    excluded = excluded_paths(tmp_path)
    assert set(FILES) - excluded == expected


def test_rule_files_are_left_out_and_an_excluded_folder_takes_everything_below(tmp_path: Path) -> None:
    _make(tmp_path, {".harborignore": "sub\n"})
    assert excluded_paths(tmp_path) == {
        ".harborignore",
        "sub",
        "sub/a.log",
        "sub/deep",
        "sub/deep/b.txt",
        "sub/build",
        "sub/build/y",
    }


def test_without_rules_nothing_is_excluded(tmp_path: Path) -> None:
    _make(tmp_path, {})
    assert excluded_paths(tmp_path) == frozenset()
    assert excluded_paths(tmp_path / "missing") == frozenset()
