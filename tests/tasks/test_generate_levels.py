"""Levels of first-steps on the command line and in the library; splits, archives and modes as properties."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from termrl.cli.tasks import app
from termrl.errors import TaskError
from termrl.tasks.generate import (
    DEMONSTRATION_WORDS,
    FAMILIES,
    VOCABULARY,
    Archive,
    File,
    Folder,
    Gzip,
    Instance,
    choose_families,
    generate,
    instances,
    words_of,
)
from termrl.tasks.generate.archives import gzip_bytes, tar_gz_bytes
from termrl.tasks.generate.checks import render_test
from tests.tasks.helpers import PlainMachine

WORDS = {*VOCABULARY, *DEMONSTRATION_WORDS}


def _words(instance: Instance) -> set[str]:
    """Every vocabulary word anywhere in an instance, its solution and what its test wants included."""
    text = repr((instance.instruction, instance.before, instance.after, instance.solution)).replace("\\n", " ")
    return set(re.findall(r"[a-z]+", text)) & WORDS


@pytest.mark.parametrize("name", list(FAMILIES))
@given(seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
@settings(max_examples=8, deadline=None)
def test_train_and_eval_share_no_word_and_no_instance(name: str, seeds: tuple[int, int]) -> None:
    train = list(instances(FAMILIES[name], "train", 6, seeds[0]))
    held_out = list(instances(FAMILIES[name], "eval", 6, seeds[1]))
    seen, unseen = set().union(*map(_words, train)), set().union(*map(_words, held_out))
    assert seen
    assert unseen
    assert seen <= set(words_of("train"))
    assert unseen <= set(words_of("eval"))
    assert not {repr(one) for one in train} & {repr(one) for one in held_out}
    assert len({repr(one) for one in train}) == 6


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_gives_enough_different_tasks_for_a_long_run(name: str) -> None:
    assert len({repr(one) for one in instances(FAMILIES[name], "train", 200, 0)}) == 200
    assert len({repr(one) for one in instances(FAMILIES[name], "eval", 40, 0)}) == 40


def test_what_must_be_looked_up_does_not_stand_in_the_instruction() -> None:
    for family in FAMILIES.values():
        if family.look_first:
            (instance,) = instances(family, "train", 1, 0)
            assert not _words(instance) <= set(re.findall(r"[a-z]+", instance.instruction))


def _run(*tokens: str) -> None:
    app(list(tokens), result_action="return_value")


def _levels(suite: Path) -> set[int]:
    return {FAMILIES[path.name.rsplit("-", 2)[0]].level for path in suite.iterdir()}


def test_levels_on_the_command_line(tmp_path: Path) -> None:
    _run("generate", str(tmp_path / "a"), "--per-family", "1", "--levels", "1,2")
    _run("generate", str(tmp_path / "b"), "--per-family", "1", "--levels", "3", "--levels", "2")
    _run("generate", str(tmp_path / "c"), "--per-family", "1", "--families", "all", "--levels", "3")
    assert [_levels(tmp_path / name) for name in "abc"] == [{1, 2}, {2, 3}, {3}]
    assert len(list((tmp_path / "a").iterdir())) == sum(family.level < 3 for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--levels", "4"], "there is no level 4"),
        (["--levels", "one"], "levels: one are not whole numbers"),
        (["--levels", "3", "--families", "make-dir"], "none of the named families is of level 3"),
    ],
)
def test_bad_levels_are_errors_and_write_nothing(tmp_path: Path, tokens: list[str], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        _run("generate", str(tmp_path / "suite"), *tokens)
    assert list(tmp_path.iterdir()) == []


def test_levels_filter_names_and_default_to_level_1() -> None:
    assert {family.level for family in choose_families()} == {1}
    assert [f.name for f in choose_families(["sort-file", "make-dir", "line-ends"])] == [
        "sort-file",
        "make-dir",
        "line-ends",
    ]
    assert [f.name for f in choose_families(["sort-file", "make-dir", "line-ends"], [3, 1])] == [
        "make-dir",
        "line-ends",
    ]
    with pytest.raises(TaskError, match="levels: none named"):
        choose_families(levels=[])


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 200_000])
def test_the_gzip_files_of_tasks_are_ones_that_others_read(size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    assert gzip.decompress(gzip_bytes(data)) == data


def test_the_archives_of_tasks_are_ones_that_others_read_and_never_change() -> None:
    packed = tar_gz_bytes({"a/b.txt": "one", "c.txt": "two"})
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = {m.name: (archive.extractfile(m) or io.BytesIO()).read() for m in archive.getmembers()}
        assert {(m.mtime, m.uid, m.mode) for m in archive.getmembers()} == {(0, 0, 0o644)}
    assert members == {"a/b.txt": b"one\n", "c.txt": b"two\n"}
    assert packed == tar_gz_bytes({"a/b.txt": "one", "c.txt": "two"})


def _machine(tmp_path: Path, instance: Instance) -> PlainMachine:
    (tmp_path / "task" / "environment").mkdir(parents=True)
    (tmp_path / "task" / "tests").mkdir()
    (tmp_path / "task" / "tests" / "test.sh").write_text(render_test(instance, extras=False))
    return PlainMachine(tmp_path / "task", tmp_path / "machine")


PACKED = Instance("", {}, {"d/a.txt": File("one"), "d/b.txt": File("two"), "x.tar.gz": Archive({"d/a.txt": "one"})}, [])
MAKE = "mkdir d; echo one > d/a.txt; echo two > d/b.txt; "


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("tar -czf x.tar.gz d/a.txt", ""),
        ("tar -czf x.tar.gz ./d/a.txt", ""),
        # There before: a new file would change the folder while tar reads it.
        (": > x.tar.gz; tar -czf x.tar.gz --no-recursion . d d/a.txt", ""),
        ("tar -czf x.tar.gz d", "x.tar.gz should not hold d/b.txt"),
        ("tar -czf x.tar.gz d/b.txt", "x.tar.gz should not hold d/b.txt"),
        ("tar -czf x.tar.gz -C d a.txt", "x.tar.gz should not hold a.txt"),
        ("tar -czf x.tar.gz --no-recursion d", "x.tar.gz does not hold d/a.txt"),
        ("tar -czf x.tar.gz d/a.txt d/a.txt --hard-dereference", "x.tar.gz "),
        ("tar -cf x.tar.gz d/a.txt", "x.tar.gz is not a readable archive"),
        ("echo no > x.tar.gz", "x.tar.gz is not a readable archive"),
        ("tar -czf x.tar.gz d/a.txt; head -c 60 x.tar.gz > y; mv y x.tar.gz", "x.tar.gz is not a readable archive"),
        ("tar -czf x.tar.gz d/a.txt; chmod +x x.tar.gz", "x.tar.gz has the wrong run permission (runs)"),
        ("tar -czf /tmp/x.$$ d/a.txt; ln -s /tmp/x.$$ x.tar.gz", "x.tar.gz is not there as a file"),
        (
            "echo x > d/a.txt; tar -czf x.tar.gz d/a.txt; echo one > d/a.txt",
            "x.tar.gz does not hold the right text of d/a.txt",
        ),
        (
            "mv d/a.txt k; ln -s /app/k d/a.txt; tar -czf x.tar.gz d/a.txt; mv k d/a.txt",
            "x.tar.gz does not hold the right text of d/a.txt",
        ),
        ("head -c 1M /dev/zero > x; tar -czf x.tar.gz d/a.txt x; rm x", "x.tar.gz should not hold x"),
    ],
)
def test_an_archive_is_judged_by_what_is_in_it(tmp_path: Path, command: str, reason: str) -> None:
    machine = _machine(tmp_path, PACKED)
    made = machine.run(MAKE + command)
    assert made.returncode == 0, made.stderr
    reward, said = machine.reward()
    assert (reward, said.startswith(f"FAIL: {reason}") if reason else said == "") == ("0" if reason else "1", True), (
        said
    )


def test_a_gzip_file_that_unpacks_to_far_too_much_scores_0_at_once(tmp_path: Path) -> None:
    machine = _machine(tmp_path, Instance("", {}, {"a.gz": Gzip("one")}, []))
    machine.run("head -c 300M /dev/zero | gzip -1 > a.gz")
    assert machine.reward() == ("0", "FAIL: a.gz is not readable by gzip")
    machine.run("echo one | gzip > a.gz")
    assert machine.reward() == ("1", "")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("mkdir -m 700 d; echo a > d/f; chmod 600 d/f", ""),
        ("mkdir -m 755 d; echo a > d/f; chmod 600 d/f", "FAIL: d has the wrong permissions"),
        ("mkdir -m 700 d; echo a > d/f; chmod 640 d/f", "FAIL: d/f has the wrong permissions"),
        ("mkdir -m 1700 d; echo a > d/f; chmod 600 d/f", "FAIL: d has the wrong permissions"),
    ],
)
def test_modes_are_exact_where_a_tree_names_them(tmp_path: Path, command: str, reason: str) -> None:
    tree = {"d": Folder(mode=0o700), "d/f": File("a", mode=0o600)}
    machine = _machine(tmp_path, Instance("", {}, tree, []))
    machine.run(command)
    assert machine.reward() == ("0" if reason else "1", reason)


def test_modes_of_the_tree_before_are_on_disk(tmp_path: Path) -> None:
    (task,) = generate(tmp_path / "s", families=["close-files"], per_family=1)
    modes = sorted(path.stat().st_mode & 0o777 for path in (task / "environment").iterdir())
    assert modes == [0o644, 0o644, 0o666, 0o666]


def test_the_page_on_tasks_lists_every_family_at_its_level() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    rows = re.findall(r"^\| (\d)[^|]*\| ([a-z, -]+) \|$", page, re.MULTILINE)
    listed = sorted((int(level), name) for level, names in rows for name in names.split(", "))
    assert listed == sorted((family.level, family.name) for family in FAMILIES.values())
    marked = {
        n for row in re.findall(r"^\| \d[^|]*look first \| (.*) \|$", page, re.MULTILINE) for n in row.split(", ")
    }
    assert marked == {family.name for family in FAMILIES.values() if family.look_first}
