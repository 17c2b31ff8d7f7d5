"""A run that is given reports takes only tasks that they call sound, as the tasks are now."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.errors import TaskError
from termrl.tasks import TaskSet
from termrl.validation.gate import check_sound
from termrl.validation.records import Report, Status, TaskReport, read_report
from tests.cli.test_main import termrl
from tests.validation.tasks import SOLVE, add


def report(path: Path, tasks: TaskSet, **statuses: Status) -> Path:
    results = {
        task.id: TaskReport(
            status=statuses.get(task.id.replace("-", "_"), Status.SOUND), digest=task.digest, detail="x"
        )
        for task in tasks.values()
    }
    whole = Report(tasks="t", sandbox="bubblewrap", repeat=2, complete=True, wall_s=1.0, termrl="0", results=results)
    whole.write(path)
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> TaskSet:
    for name in ("one", "two", "three"):
        add(tmp_path / "tasks", name)
    return TaskSet.load(tmp_path / "tasks")


def test_sound_tasks_pass_and_without_a_report_nothing_is_asked(tmp_path: Path, tasks: TaskSet) -> None:
    check_sound([report(tmp_path / "r.json", tasks)], tasks)
    check_sound([], tasks)


def test_unsound_unknown_and_changed_tasks_are_each_named(tmp_path: Path, tasks: TaskSet) -> None:
    path = report(tmp_path / "r.json", tasks, one=Status.ORACLE_FAILS)
    add(tmp_path / "tasks", "two", solve=SOLVE + "true\n")
    add(tmp_path / "tasks", "new")
    with pytest.raises(TaskError) as caught:
        check_sound([path], TaskSet.load(tmp_path / "tasks"))
    head, *lines = caught.value.message.splitlines()
    assert head == "3 of 4 tasks are not known to be sound (tasks.validation)"
    assert sorted(lines) == [
        "new: not in the report",
        "one: oracle_fails: x",
        "two: changed since it was validated",
    ]


def test_one_of_several_reports_is_enough(tmp_path: Path, tasks: TaskSet) -> None:
    first = report(tmp_path / "a.json", tasks, one=Status.INFRASTRUCTURE)
    second = report(tmp_path / "b.json", tasks.only(["one"]))
    check_sound([first, second], tasks)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 9}'])
def test_what_is_no_report_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(TaskError, match=r"r\.json: not a report"):
        read_report(tmp_path / "r.json")
    with pytest.raises(TaskError, match="absent: cannot be read"):
        read_report(tmp_path / "absent")


def test_a_run_is_refused_before_it_makes_anything_unless_told(tmp_path: Path, tasks: TaskSet) -> None:
    add(tmp_path / "held-out", "apart")
    held_out = TaskSet.load(tmp_path / "held-out")
    report(tmp_path / "train.json", tasks, two=Status.PASSES_UNTOUCHED)
    report(tmp_path / "held-out.json", held_out)
    given = ["train", "--tasks.dir", "tasks", "--evaluation.dir", "held-out", "--run-dir", "run", "--model", "./none"]
    reports = ["--tasks.validation", "train.json,held-out.json"]
    refused = termrl(*given, *reports, cwd=tmp_path)
    assert refused.returncode == 2 and "two: passes_untouched: x" in refused.stderr
    assert not (tmp_path / "run").exists()
    told = termrl(*given, *reports, "--tasks.allow-unsound", "true", cwd=tmp_path)
    assert "none: no such model folder" in told.stderr
    assert "apart: not in the report" in termrl(*given, "--tasks.validation", "train.json", cwd=tmp_path).stderr
