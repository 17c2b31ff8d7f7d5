"""A task's digest says what reaches a sandbox, and a task that changes after it was loaded is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from termrl.errors import TaskError
from termrl.tasks import TaskSet, digest, load_task
from tests.tasks.helpers import write_task


def test_what_harborignore_leaves_out_does_not_count(tmp_path: Path) -> None:
    ignoring = {"tests/.harborignore": "*.log\ncache/\n", "tests/a.py": "", "solution/solve.sh": "true\n"}
    task = write_task(tmp_path / "a", files=ignoring)
    before = digest(task)
    (task / "tests" / "run.log").write_text("noise")
    (task / "tests" / "cache").mkdir()
    (task / "tests" / "cache" / "x").write_text("noise")
    assert digest(task) == before
    (task / "environment").mkdir()
    (task / "environment" / "run.log").write_text("not ignored here")
    assert digest(task) != before


def test_version_control_and_other_permissions_do_not_count(tmp_path: Path) -> None:
    task = write_task(tmp_path / "a")
    before = digest(task)
    (task / ".git").write_text("gitdir: elsewhere")
    (task / "instruction.md").chmod(0o600)
    assert digest(task) == before


def _touched(task: Path) -> None:
    os.utime(task / "tests" / "test.sh", (1, 1))


def _rewritten(task: Path) -> None:
    path = task / "tests" / "test.sh"
    path.write_bytes(path.read_bytes())


def test_a_task_that_was_only_touched_is_unchanged(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "a"))
    for same in (_touched, _rewritten):
        same(task.path)
        task.check_unchanged()


def _same_size_and_time(task: Path) -> None:
    path = task / "tests" / "test.sh"
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"1", b"0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_same_size_and_time, r"tests/test\.sh"),
        (lambda task: (task / "tests" / "test.sh").chmod(0o755), r"tests/test\.sh"),
        (lambda task: (task / "tests" / "conftest.py").write_text(""), r"tests/conftest\.py \(new\)"),
        (lambda task: (task / "instruction.md").unlink(), r"instruction\.md \(gone\)"),
        (lambda task: task.rename(task.with_name("b")), "gone since it was loaded"),
    ],
)
def test_a_task_that_changed_on_disk_is_named_with_its_files(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    task = load_task(write_task(tmp_path / "a"))
    # the kernel's clock for files ticks every few milliseconds
    time.sleep(0.02)
    change(task.path)
    for _ in range(2):
        with pytest.raises(TaskError, match=f"{task.path}: .*{said}"):
            task.check_unchanged()


def test_looking_whether_a_task_changed_takes_less_than_a_millisecond(tmp_path: Path) -> None:
    files = {f"environment/{n}.txt": "x" * 1000 for n in range(40)}
    task = TaskSet.load(write_task(tmp_path / "a", files=files))["a"]
    times = []
    for _ in range(20):
        start = time.perf_counter()
        task.check_unchanged()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.001
