"""Collections: what is missing, empty, broken or doubled is named, and the good ones stay usable."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.errors import TaskError
from termrl.tasks import TaskSet
from tests.tasks.helpers import MINIMAL, write_task


def test_tasks_are_a_mapping_in_the_order_of_their_ids(tmp_path: Path) -> None:
    write_task(tmp_path / "b", toml='[task]\nname = "o/a1"\n' + MINIMAL)
    write_task(tmp_path / "a", toml='[task]\nname = "o/z1"\n' + MINIMAL)
    write_task(tmp_path / ".hidden", toml="broken = =")
    (tmp_path / "README.md").write_text("not a task")
    tasks = TaskSet.load(tmp_path)
    assert list(tasks) == ["a1", "z1"]
    assert tasks["a1"].path.name == "b"
    assert (len(tasks), tasks.broken, "b" in tasks) == (2, {}, False)


def test_a_folder_that_is_itself_a_task_is_a_set_of_one(tmp_path: Path) -> None:
    assert list(TaskSet.load(write_task(tmp_path / "one"))) == ["one"]


def test_missing_empty_and_plain_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="nowhere: no such folder"):
        TaskSet.load(tmp_path / "nowhere")
    with pytest.raises(TaskError, match="holds no task folders"):
        TaskSet.load(tmp_path, skip_broken=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskError, match="file: a file, not a folder"):
        TaskSet.load(tmp_path / "file")


def test_a_path_that_the_system_refuses_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read: File name too long"):
        TaskSet.load(tmp_path / ("x" * 300))


def _mixed(folder: Path) -> Path:
    write_task(folder / "good")
    write_task(folder / "bad-toml", toml="x = = 1")
    write_task(folder / "no-toml", toml=None)
    write_task(folder / "silent", instruction="")
    write_task(folder / "steps", toml=MINIMAL + '[[steps]]\nname = "a"')
    return folder


def test_broken_tasks_are_named_one_by_one(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        TaskSet.load(_mixed(tmp_path))
    head, *lines = caught.value.message.splitlines()
    assert head == f"{tmp_path}: 4 of 5 tasks are broken"
    assert [next(n for n in ("bad-toml", "no-toml", "silent", "steps") if f"/{n}" in line) for line in lines] == [
        "bad-toml",
        "no-toml",
        "silent",
        "steps",
    ]
    assert caught.value.hint is not None
    assert "--skip-broken" in caught.value.hint


def test_skip_broken_leaves_the_good_ones(tmp_path: Path) -> None:
    tasks = TaskSet.load(_mixed(tmp_path), skip_broken=True)
    assert list(tasks) == ["good"]
    assert sorted(tasks.broken) == ["bad-toml", "no-toml", "silent", "steps"]
    assert "not valid TOML" in tasks.broken["bad-toml"]


def test_a_set_of_broken_tasks_only_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    write_task(tmp_path / "bad", toml=None)
    with pytest.raises(TaskError, match="1 of 1 tasks are broken"):
        TaskSet.load(tmp_path, skip_broken=True)


def test_two_tasks_of_one_name_are_both_broken(tmp_path: Path) -> None:
    write_task(tmp_path / "first", toml='[task]\nname = "org/same"\n' + MINIMAL)
    write_task(tmp_path / "second", toml='[task]\nname = "other/same"\n' + MINIMAL)
    write_task(tmp_path / "third")
    with pytest.raises(TaskError, match="the name same is used by several tasks: first, second"):
        TaskSet.load(tmp_path)
    tasks = TaskSet.load(tmp_path, skip_broken=True)
    assert list(tasks) == ["third"]
    assert sorted(tasks.broken) == ["first", "second"]


def test_families_warnings_and_selection(tmp_path: Path) -> None:
    for name, family in (("a", "y"), ("b", "x"), ("c", "y")):
        toml = f'[metadata]\ntermrl_userland = "host"\nfamily = "{family}"\n[environment]\nhue = 1'
        write_task(tmp_path / name, toml=toml)
    tasks = TaskSet.load(tmp_path)
    assert {name: [task.id for task in members] for name, members in tasks.families.items()} == {
        "x": ["b"],
        "y": ["a", "c"],
    }
    assert list(tasks.warnings) == ["a", "b", "c"]
    assert "unknown key environment.hue" in tasks.warnings["a"][0]
    assert list(tasks.only(["c", "a"])) == ["a", "c"]
    with pytest.raises(TaskError, match="no task named nope"):
        tasks.only(["a", "nope"])
