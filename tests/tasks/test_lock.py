"""A folder's lock: easy to read and to compare, and held against the tasks whenever they are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from termrl.cli.tasks import app
from termrl.errors import TaskError
from termrl.tasks import TaskSet
from termrl.tasks.lock import LOCK_FILE, Lock, read_lock, write_lock
from tests.tasks.helpers import MINIMAL, write_task


def _lock(folder: Path) -> None:
    app(["lock", str(folder)], result_action="return_value")


def test_a_lock_is_sorted_one_task_a_line_and_reads_back(tmp_path: Path) -> None:
    lock = Lock({"b": "2" * 64, "a": "1" * 64}, "https://host/x.git", "f" * 40)
    lines = write_lock(tmp_path, lock).read_text().splitlines()
    assert [line.strip()[:4] for line in lines if "sha256:" in line] == ['"a":', '"b":']
    assert read_lock(tmp_path) == lock


def test_locking_again_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / name)
    _lock(tmp_path)
    first = (tmp_path / LOCK_FILE).read_bytes()
    _lock(tmp_path)
    assert (tmp_path / LOCK_FILE).read_bytes() == first
    assert list(TaskSet.load(tmp_path)) == ["a", "b"]


def test_tasks_that_are_not_as_they_were_locked_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("same", "other", "gone"):
        write_task(tmp_path / name)
    _lock(tmp_path)
    write_task(tmp_path / "other", instruction="Do something else.\n")
    write_task(tmp_path / "new")
    (tmp_path / "gone").rename(tmp_path / ".gone")
    with pytest.raises(TaskError) as caught:
        TaskSet.load(tmp_path)
    message = caught.value.message
    assert "other: changed since it was locked" in message
    assert "new: is not locked" in message
    assert "gone: is locked, but not there" in message
    assert "same:" not in message
    assert list(TaskSet.load(tmp_path, skip_broken=True)) == ["same"]
    _lock(tmp_path)
    assert list(TaskSet.load(tmp_path)) == ["new", "other", "same"]


def test_a_lock_keeps_its_source_only_while_it_holds_nothing_else(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_task(tmp_path / name)
    digests = {task.id: task.digest for task in TaskSet.load(tmp_path).values()}
    write_lock(tmp_path, Lock(digests, "https://host/x.git", "f" * 40))
    (tmp_path / "b").rename(tmp_path / ".b")
    _lock(tmp_path)
    fewer = read_lock(tmp_path)
    assert fewer is not None and (list(fewer.tasks), fewer.commit) == (["a"], "f" * 40)
    write_task(tmp_path / "a", toml=MINIMAL + "# mine\n")
    _lock(tmp_path)
    changed = read_lock(tmp_path)
    assert changed is not None and (changed.source, changed.commit) == (None, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "tasks": []}', "\xff"])
def test_what_is_no_lock_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    write_task(tmp_path / "a")
    (tmp_path / LOCK_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(TaskError, match=LOCK_FILE):
        TaskSet.load(tmp_path)


def test_a_lock_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "a")
    (tmp_path / LOCK_FILE).write_text(json.dumps({"version": 2, "tasks": {}}))
    with pytest.raises(TaskError, match="version 2"):
        TaskSet.load(tmp_path)
