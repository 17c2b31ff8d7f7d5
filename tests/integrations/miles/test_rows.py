"""Prompt data for miles, as the command line writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from termrl.agent.prompts import opening
from termrl.cli import run
from termrl.tasks import TaskSet
from termrl.validation.records import Report, Status, TaskReport
from tests.endtoend.tiny import write_tasks

WORDS = tuple(f"w{number:02d}" for number in range(20))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks", WORDS)


def rows(path: Path) -> list[str]:
    return [json.loads(line)["metadata"]["task_id"] for line in path.read_text().splitlines()]


def write(folder: Path, *arguments: str) -> list[str]:
    """The ids in the file that ``termrl tasks rows`` writes."""
    output = folder.parent / "rows.jsonl"
    output.unlink(missing_ok=True)
    assert run(["tasks", "rows", str(folder), *arguments, "-o", str(output)]) == 0
    return rows(output)


def results(folder: Path, *lines: tuple[str, int, float | None]) -> str:
    run_folder = folder.parent / "eval"
    run_folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"task_id": t, "sample": s, "reward": r}) + "\n" for t, s, r in lines)
    (run_folder / "results.jsonl").write_text(text + '{"task_id": "torn')
    return str(run_folder)


def test_a_row_is_what_miles_reads(folder: Path) -> None:
    assert write(folder, "--n", "2") == ["make-w00", "make-w01"]
    (line, _) = (folder.parent / "rows.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "prompt": list(opening("terminal-bench").messages),
        "metadata": {"task_id": "make-w00"},
    }


def test_the_opening_with_demonstrations_can_be_asked_for(folder: Path) -> None:
    write(folder, "--n", "1", "--opening", "first-steps")
    row = json.loads((folder.parent / "rows.jsonl").read_text())
    assert [message["role"] for message in row["prompt"][:3]] == ["system", "user", "assistant"]


def test_globs_choose(folder: Path) -> None:
    assert write(folder, "--include", "make-w0[12],make-w19") == ["make-w01", "make-w02", "make-w19"]
    assert len(write(folder, "--exclude", "make-w0*")) == 10


def test_the_splits_share_no_task_and_do_not_depend_on_other_tasks(folder: Path) -> None:
    train, held_out = write(folder, "--split", "train"), write(folder, "--split", "eval")
    assert sorted([*train, *held_out]) == [f"make-{word}" for word in WORDS]
    assert 1 <= len(held_out) <= 10
    assert write(folder, "--split", "eval", "--include", "make-w0*") == [t for t in held_out if t.startswith("make-w0")]
    assert write(folder, "--split", "eval", "--eval-share", "1") == sorted([*train, *held_out])


def test_a_split_that_the_task_names_holds(folder: Path) -> None:
    toml = folder / "make-w00" / "task.toml"
    for split in ("train", "eval"):
        toml.write_text(toml.read_text().replace("[metadata]\n", f'[metadata]\nsplit = "{split}"\n', 1))
        assert "make-w00" in write(folder, "--split", split)
        toml.write_text(toml.read_text().replace(f'split = "{split}"\n', ""))


def test_the_band_keeps_tasks_with_signal_and_names_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = results(
        folder,
        *[("make-w00", sample, 0.0) for sample in range(4)],
        *[("make-w01", sample, float(sample < 2)) for sample in range(4)],
        *[("make-w02", sample, 1.0) for sample in range(4)],
        ("make-w03", 0, None),
        ("make-w04", 0, None),
        ("make-w04", 1, 0.0),
        ("make-w04", 0, 1.0),
    )
    assert write(folder, measured, "--band", "0.1-0.9", "--include", "make-w0[0-5]") == ["make-w01", "make-w04"]
    said = capsys.readouterr().err
    assert "make-w00: pass rate 0 is outside 0.1-0.9" in said and "make-w02: pass rate 1 is" in said
    assert "make-w03: not measured" in said and "make-w05: not measured" in said
    assert "make-w01" not in said


def test_unsound_tasks_can_be_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = TaskSet.load(folder).only(["make-w00", "make-w01"])
    found = {
        "make-w00": TaskReport(status=Status.SOUND, digest=tasks["make-w00"].digest),
        "make-w01": TaskReport(status=Status.FLAKY, digest=tasks["make-w01"].digest, detail="1 of 3"),
    }
    report = Report(tasks="t", sandbox="b", repeat=1, complete=True, wall_s=1.0, termrl="0", results=found)
    report.write(folder.parent / "report.json")
    validation = ("--validation", str(folder.parent / "report.json"))
    assert write(folder, *validation, "--include", "make-w0[0-2]") == ["make-w00"]
    said = capsys.readouterr().err
    assert "make-w01: flaky: 1 of 3" in said and "make-w02: not in the report" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--band", "0.1-0.9"], "go together"),
        (["RESULTS"], "go together"),
        (["RESULTS", "--band", "0.9-0.1"], "the smaller first"),
        (["RESULTS", "--band", "often"], "0.1-0.9"),
        (["/no/results", "--band", "0.1-0.9"], "no such file"),
        (["--include", "nothing"], "no task is left"),
        (["--opening", "first-step"], "did you mean 'first-steps'"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    output = folder.parent / "rows.jsonl"
    given = [results(folder, ("make-w00", 0, 1.0)) if text == "RESULTS" else text for text in arguments]
    assert run(["tasks", "rows", str(folder), *given, "-o", str(output)]) == 2
    assert says in capsys.readouterr().err
    assert not output.exists()


def test_results_that_are_none_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder.parent / "other.jsonl"
    file.write_text('{"task": "x"}\n')
    assert run(["tasks", "rows", str(folder), str(file), "--band", "0-1", "-o", str(folder.parent / "r")]) == 2
    assert "not results of termrl eval" in capsys.readouterr().err
