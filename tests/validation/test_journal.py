"""A study that was cut short goes on where it was, and does again only what says nothing or is about something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.errors import TaskError, TermrlError
from termrl.tasks import TaskSet
from termrl.validation.journal import Journal
from termrl.validation.records import Attempt
from termrl.verifier.verdict import Cause, Verdict
from tests.validation.tasks import SOLVE, add


@pytest.fixture
def tasks(tmp_path: Path) -> TaskSet:
    add(tmp_path / "tasks", "good")
    return TaskSet.load(tmp_path / "tasks")


def attempt(tasks: TaskSet, round: int, verdict: Verdict | None = None, **fields: str) -> Attempt:
    known = {"task_id": "good", "digest": tasks["good"].digest, "sandbox": "bubblewrap", **fields}
    return Attempt(kind="oracle", round=round, verdict=verdict or Verdict.scored(1.0), **known)  # pyright: ignore[reportArgumentType]


def test_attempts_with_a_verdict_are_kept_and_others_are_not(tmp_path: Path, tasks: TaskSet) -> None:
    path = tmp_path / "journal"
    with Journal(path, resume=False) as journal:
        for made in (
            attempt(tasks, 0),
            attempt(tasks, 1, Verdict.missing(Cause.SANDBOX_LOST)),
            attempt(tasks, 2, Verdict.scored(0.0)),
            attempt(tasks, 3, digest="0" * 64),
            attempt(tasks, 4, sandbox="docker"),
            attempt(tasks, 5, task_id="gone"),
        ):
            journal.add(made)
    with Journal(path, resume=True) as journal:
        assert [kept.round for kept in journal.usable(tasks, "bubblewrap")] == [0, 2]
    add(tmp_path / "tasks", "good", solve=SOLVE + "true\n")
    with Journal(path, resume=True) as journal:
        assert journal.usable(TaskSet.load(tmp_path / "tasks"), "bubblewrap") == []


def test_a_torn_line_is_forgotten_and_the_next_one_is_whole(tmp_path: Path, tasks: TaskSet) -> None:
    path = tmp_path / "journal"
    with Journal(path, resume=False) as journal:
        journal.add(attempt(tasks, 0))
        journal.add(attempt(tasks, 1))
    path.write_bytes(path.read_bytes()[:-20])
    with Journal(path, resume=True) as journal:
        journal.add(attempt(tasks, 2))
    with Journal(path, resume=True) as journal:
        assert [kept.round for kept in journal.kept] == [0, 2]


def test_a_journal_is_never_begun_over_another_and_has_one_writer(tmp_path: Path, tasks: TaskSet) -> None:
    path = tmp_path / "journal"
    with Journal(path, resume=False) as journal:
        journal.add(attempt(tasks, 0))
        with pytest.raises(TermrlError, match="another process writes to it"):
            Journal(path, resume=True)
    with pytest.raises(TaskError, match="there already"):
        Journal(path, resume=False)


def test_a_study_that_never_began_leaves_no_journal(tmp_path: Path) -> None:
    for _ in range(2):
        with Journal(tmp_path / "journal", resume=False):
            assert (tmp_path / "journal").exists()
        assert not (tmp_path / "journal").exists()


def test_what_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text('{"step": 1}\n')
    with pytest.raises(TaskError, match="not a journal"):
        Journal(tmp_path / "journal", resume=True)
