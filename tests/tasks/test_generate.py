"""The suite first-steps: repeatable, disjoint splits, sound tests that cannot be cheated by the obvious shortcuts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from termrl.errors import TaskError
from termrl.tasks import TaskSet, digest
from termrl.tasks.generate import (
    DEMONSTRATION_WORDS,
    FAMILIES,
    LEVELS,
    VOCABULARY,
    Family,
    File,
    Folder,
    Instance,
    generate,
    split_of,
    words_of,
)
from termrl.tasks.generate.checks import render_test
from termrl.tasks.generate.family import Draw
from tests.tasks.helpers import PlainMachine

ALL = list(FAMILIES)
SEEDS = range(2)  # of each split one; 20 in test_generate_sandboxed.py
TOOLS = set(
    "awk bash cat chmod cp echo find for grep gzip head ls mkdir mv rm sed set sort tac tail tar touch wc".split()  # noqa: SIM905
)


def _words(folder: Path) -> set[str]:
    """Every vocabulary word in what the policy can see of a task: its instruction, file names and contents."""
    text = (folder / "instruction.md").read_text()
    for path in (folder / "environment").rglob("*"):
        text += f" {path.relative_to(folder / 'environment')} "
        text += path.read_text(errors="replace") if path.is_file() else ""
    return set(re.findall(r"[a-z]+", text)) & {*VOCABULARY, *DEMONSTRATION_WORDS}


def test_the_vocabulary_is_large_plain_and_free_of_commands() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) >= 400
    assert all(re.fullmatch(r"[a-z]{2,10}", word) for word in (*VOCABULARY, *DEMONSTRATION_WORDS))
    builtins = subprocess.run(["bash", "-c", "compgen -bk"], capture_output=True, text=True, check=True).stdout.split()
    assert not {*VOCABULARY, *DEMONSTRATION_WORDS} & {*builtins, *TOOLS, "file", "directory", "word", "line", "note"}


def test_words_of_the_splits_and_of_demonstrations_are_disjoint() -> None:
    train, held_out, shown = set(words_of("train")), set(words_of("eval")), set(DEMONSTRATION_WORDS)
    assert len(train) >= 300
    assert len(held_out) >= 100
    assert train | held_out == set(VOCABULARY)
    assert not train & held_out
    assert not shown & set(VOCABULARY)
    assert {split_of(word) for word in train} == {"train"}


def test_the_issues_families_stand() -> None:
    level_1 = [family for family in FAMILIES.values() if family.level == 1]
    assert len(level_1) >= 8
    assert sum(family.look_first for family in level_1) >= 1
    assert len(FAMILIES) >= 20
    assert LEVELS == (1, 2, 3)
    assert all(sum(family.level == level for family in FAMILIES.values()) >= 6 for level in LEVELS)
    assert sum(family.look_first for family in FAMILIES.values() if family.level == 3) >= 6


def test_the_same_arguments_write_the_same_bytes_and_others_do_not(tmp_path: Path) -> None:
    def write(name: str, **arguments: object) -> str:
        generate(tmp_path / name, **{"families": ["make-dir", "sort-file"], "per_family": 3, **arguments})  # pyright: ignore[reportArgumentType]
        return digest(tmp_path / name)

    first = write("a")
    assert write("b") == first
    assert len({first, write("c", seed=1), write("d", split="eval"), write("e", per_family=4)}) == 4


def test_another_process_with_another_hash_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    generate(tmp_path / "here", families=ALL, per_family=2)
    code = (
        "from pathlib import Path; from termrl.tasks.generate import *;"
        f"generate(Path({str(tmp_path / 'there')!r}), families=list(FAMILIES), per_family=2)"
    )
    env = {"PYTHONHASHSEED": "77", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    subprocess.run(["bash", "-c", f'umask 077; exec {sys.executable} -c "$0"', code], env=env, check=True)
    assert digest(tmp_path / "there") == digest(tmp_path / "here")
    assert (tmp_path / "there" / "make-dir-train-000").stat().st_mode & 0o777 == 0o755


def test_more_of_a_family_begins_with_the_same_ones(tmp_path: Path) -> None:
    few = generate(tmp_path / "few", families=["copy-file"], per_family=3, seed=4)
    more = generate(tmp_path / "more", families=["copy-file"], per_family=9, seed=4)
    assert [digest(path) for path in few] == [digest(path) for path in more[:3]]
    assert len({digest(path) for path in more}) == 9


def test_written_train_and_eval_tasks_share_no_word(tmp_path: Path) -> None:
    train = generate(tmp_path / "train", families=ALL, per_family=20)
    held_out = generate(tmp_path / "eval", families=ALL, per_family=20, split="eval", seed=1)
    seen = set().union(*map(_words, train))
    unseen = set().union(*map(_words, held_out))
    assert len(seen) > 200
    assert len(unseen) > 80
    assert not seen & unseen
    assert not (seen | unseen) & set(DEMONSTRATION_WORDS)


def test_generated_folders_are_complete_harbor_tasks_that_load_without_warnings(tmp_path: Path) -> None:
    paths = generate(tmp_path / "s", families=ALL, per_family=2, split="eval")
    tasks = TaskSet.load(tmp_path / "s")
    assert tasks.warnings == {}
    assert [path.name for path in paths] == [f"{f}-eval-{i:03d}" for f in ALL for i in range(2)]
    assert sorted(tasks.families) == sorted(ALL)
    for task in tasks.values():
        assert task.sandbox.host_userland
        assert task.sandbox.image
        assert task.sandbox.files is not None
        assert (task.sandbox.network_mode, task.sandbox.workdir) == ("no-network", "/app")
        assert task.sandbox.env == {"TIME_STYLE": "+"}
        assert (task.verifier_timeout_s, task.agent_timeout_s) == (30, 60)
        assert (task.level, task.metadata["split"]) == (FAMILIES[task.family].level, "eval")
        assert task.solution is not None
        assert not task.tests_use_network
        assert not (task.path / "environment" / "Dockerfile").exists()


def test_instructions_are_one_short_sentence(tmp_path: Path) -> None:
    for path in generate(tmp_path / "s", families=ALL, per_family=5):
        text = (path / "instruction.md").read_text()
        assert re.fullmatch(r"[A-Z][^\n.]*(\.(txt|md|sh|conf|bak|gz|tar\.gz)\b[^\n.]*)*\.\n", text), text
        assert len(text) < (90, 90, 110)[FAMILIES[path.name.rsplit("-", 2)[0]].level - 1]


def test_solutions_use_basic_tools_only(tmp_path: Path) -> None:
    for path in generate(tmp_path / "s", families=ALL, per_family=1):
        lines = (path / "solution" / "solve.sh").read_text().splitlines()
        assert lines[0] == "#!/bin/bash"
        assert {line.split()[0] for line in lines[1:]} <= TOOLS


@pytest.mark.parametrize("name", ALL)
def test_the_oracle_scores_1_and_doing_nothing_0(tmp_path: Path, name: str) -> None:
    for seed in SEEDS:
        (task,) = generate(
            tmp_path / str(seed), families=[name], per_family=1, seed=seed, split=("train", "eval")[seed % 2]
        )
        machine = PlainMachine(task, tmp_path / f"machine-{seed}")
        reward, reason = machine.reward()
        assert reward == "0"
        assert re.fullmatch(r"FAIL: \S+ (is|does|has|should) .+", reason)
        assert machine.reward(machine.solution) == ("1", "")


@pytest.mark.parametrize("name", ALL)
def test_a_solved_task_in_which_something_else_was_touched_scores_0(tmp_path: Path, name: str) -> None:
    (task,) = generate(tmp_path / "s", families=[name], per_family=1)
    kept = 'f=$(find . -type f -size +0 | sort | head -n 1); [ -n "$f" ] || exit 9; '
    for index, damage in enumerate(
        [
            "touch .extra",
            "mkdir extra",
            "ln -s nowhere extra",
            kept + 'echo more >> "$f"',
            kept + 'rm "$f"',
            kept + 'if [ -x "$f" ]; then chmod -x "$f"; else chmod +x "$f"; fi',
            kept + 'mv "$f" /app/../moved; ln -s ../moved "$f"',
            kept + 'rm "$f"; mkdir "$f"',
        ]
    ):
        machine = PlainMachine(task, tmp_path / str(index))
        assert machine.reward(machine.solution, damage)[0] == "0", damage


def test_a_working_directory_that_is_gone_scores_0(tmp_path: Path) -> None:
    (task,) = generate(tmp_path / "s", families=["make-dir"], per_family=1)
    machine = PlainMachine(task, tmp_path / "m")
    machine.run("rm -rf /app")
    machine.run((task / "tests" / "test.sh").read_text())
    assert (machine.logs / "reward.txt").read_text() == "0\n"


# Shortcuts that look like a solution. {0}, {1} are the first names in the instruction.
SHORTCUTS = [
    ("make-dir", "touch {0}"),
    ("make-two-dirs", "mkdir {0}"),
    ("make-nested-dir", "mkdir -p {1}"),
    ("remove-file", "rm *"),
    ("remove-file", "mv {0} kept.txt"),
    ("remove-dir", "rm -f {0}/*"),
    ("make-executable", "chmod +x *"),
    ("rename-file", "cp {0} {1}"),
    ("rename-file", "rm {0}; touch {1}"),
    ("copy-file", "mv {0} {1}"),
    ("copy-file", "touch {1}"),
    ("copy-file", "ln -s {0} {1}"),
    ("move-into-dir", "cp {0} {1}/"),
    ("create-empty", "echo > {0}"),
    ("create-empty", "mkdir {0}"),
    ("write-word", "touch {1}"),
    ("write-word", "echo a {0} > {1}"),
    ("append-line", "echo {0} > {1}"),
    ("follow-note", "mkdir note"),
    ("make-named-dir", "mkdir name"),
    ("remove-named", "rm list.txt"),
    ("remove-empty", "rm *"),
    ("count-lines", "wc -l {0} > {1}"),
    ("sort-file", "cp {0} {1}"),
    ("sort-file", "sort -o {0} {0}; cp {0} {1}"),
    ("first-lines", "cp {1} {2}"),
    ("matching-lines", "cp {0} {2}"),
    ("find-and-copy", "cat * > {1}"),
    ("last-lines", "head -n {0} {1} > {2}"),
    ("reverse-lines", "sort -r {0} > {1}; cp {0} {1}"),
    ("unique-lines", "sort {0} > {1}"),
    ("unique-lines", "uniq {0} > {1}"),
    ("count-matches", "wc -l < {0} > {2}"),
    ("count-matches", "grep -c {1} {0}"),
    ("replace-line", "echo {1} > {2}"),
    ("replace-line", "echo {1} >> {2}"),
    ("delete-line", "sed -i s/{0}// {1}"),
    ("second-words", "cut -d ' ' -f 1 {0} > {1}"),
    ("sum-numbers", "wc -l < {0} > {1}"),
    ("join-files", "cat {1} {0} > {2}"),
    ("join-files", "cat {1} >> {0}"),
    ("count-files", "ls > {1}"),
    ("move-by-suffix", "cp *.md {0}/"),
    ("move-by-suffix", "mv * {0}/"),
    ("private-file", "chmod 700 {0}"),
    ("private-file", "chmod 600 *"),
    ("pack-dir", "touch {1}"),
    ("pack-dir", "gzip -r {0}"),
    ("pack-dir", "tar -cf {1} {0}"),
    ("pack-dir", "tar -czf {1} *"),
    ("pack-dir", "cd {0}; tar -czf ../{1} *"),
    ("pack-dir", "for f in {0}/*; do echo x > $f; done; tar -czf {1} {0}"),
    ("pack-dir", "cp -r {0} kept; rm {0}/*; touch {0}/x; tar -czf {1} {0}; rm -r {0}; mv kept {0}"),
    ("pack-dir", "cp -r {0} k; cd {0}; for f in *; do ln -sf /app/k/$f $f; done; cd ..; tar -czf {1} {0}"),
    ("unpack-archive", "gzip -d {0}"),
    ("unpack-archive", "tar -xzf {0}; rm {0}"),
    ("unpack-one", "tar -xzf {1}"),
    ("unpack-one", "touch {0}"),
    ("compress-file", "mv {0} {0}.gz"),
    ("compress-file", "gzip -k {0}"),
    ("compress-file", "gzip {0}; echo x | gzip >> {0}.gz"),
    ("decompress-file", "gzip -dk {0}"),
    ("decompress-file", "touch $(basename {0} .gz); rm {0}"),
    ("find-and-remove", "rm *"),
    ("find-and-move", "cp */{0} ."),
    ("remove-largest", "rm $(ls -S | tail -n 1)"),
    ("run-scripts", "chmod +x *"),
    ("close-files", "chmod 640 *"),
    ("close-files", "chmod o-w *"),
    ("private-dir", "chmod -R 700 {0}"),
    ("private-dir", "chmod 700 {0}"),
    ("misplaced-file", "rm {0}"),
    ("misplaced-file", "cp */$(grep -o '[a-z]*.txt' {0}) $(grep -o '[a-z]*/' {0})"),
    ("misnamed-file", "cp $(grep -o '[a-z]*/[a-z]*' {0}).md $(grep -o '[a-z]*/.*' {0})"),
    ("line-ends", "rm $(grep -l $'\\r' *)"),
    ("same-port", "cp {1} {0}"),
    ("same-port", "cp {0} {1}"),
    ("put-back", "rm *.bak"),
    ("put-back", "for f in *.bak; do cp $f $(basename $f .bak); done"),
    ("restore-file", "rm {0}"),
    ("restore-file", "tar -xzf {1}/*"),
    ("rename-everywhere", "sed -i s/^{0}$/{1}/ {2}/*.txt"),
    ("rename-everywhere", "sed -i s/^{0}$/{1}/ */*/*.txt"),
    ("remove-repeat", "rm *.md"),
    ("remove-repeat", "f=$(grep -xf <(cat *.md) *.txt); rm $(echo $f | cut -d : -f 1)"),
    ("follow-steps", "$(sed -n 's/Make a directory named \\(.*\\)./mkdir \\1/p' note.txt)"),
    ("follow-chain", "rm $(cat {0})"),
    ("split-lines", "awk '{{print $1 > ($2 \".md\")}}' {0}"),
    ("make-listed", "cd {0}; touch $(cat ../list.txt) new"),
    ("make-listed", "cd {0}; for f in $(cat ../list.txt); do : > $f; done"),
    ("remove-unlisted", "cd {0}; rm $(cat ../list.txt)"),
    ("remove-unlisted", "rm {0}/*"),
    ("move-matching", "mv *.txt {1}/"),
    ("move-matching", "cp $(grep -lx {0} *.txt) {1}/"),
]


def test_every_family_of_levels_2_and_3_has_a_shortcut_that_must_fail() -> None:
    covered = {name for name, _ in SHORTCUTS}
    assert [family.name for family in FAMILIES.values() if family.level > 1 and family.name not in covered] == []


@pytest.mark.parametrize(("name", "command"), SHORTCUTS)
def test_shortcuts_score_0(tmp_path: Path, name: str, command: str) -> None:
    for task in generate(tmp_path / "s", families=[name], per_family=3):
        instruction = (task / "instruction.md").read_text()
        known = [
            w for w in re.findall(r"[\w/.]*\w", instruction) if set(re.split(r"\W", w)) & set(VOCABULARY) or w.isdigit()
        ]
        names = [part for word in known for part in (word.split("/") if name == "make-nested-dir" else [word])]
        machine = PlainMachine(task, tmp_path / task.name)
        machine.run(command.format(*names))
        reward, reason = machine.reward()
        assert reward == "0"
        assert reason.startswith("FAIL: ")


def test_written_text_passes_without_its_trailing_newline(tmp_path: Path) -> None:
    (task,) = generate(tmp_path / "s", families=["write-word"], per_family=1)
    machine = PlainMachine(task, tmp_path / "m")
    assert machine.reward(machine.solution.replace("echo", "echo -n"))[0] == "1"


def test_a_family_may_tolerate_extras_but_not_damage(tmp_path: Path) -> None:
    instance = Instance("Make a.", {"keep.txt": File("k")}, {"keep.txt": File("k"), "a": Folder()}, ["mkdir a"])
    (tmp_path / "task" / "environment").mkdir(parents=True)
    (tmp_path / "task" / "environment" / "keep.txt").write_text("k\n")
    (tmp_path / "task" / "tests").mkdir()
    (tmp_path / "task" / "tests" / "test.sh").write_text(render_test(instance, extras=True))
    machine = PlainMachine(tmp_path / "task", tmp_path / "m")
    machine.run("mkdir a; touch b")
    assert machine.reward()[0] == "1"
    machine.run("rm keep.txt")
    assert machine.reward() == ("0", "FAIL: keep.txt is not there as a file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"families": ["make-dri"]}, "no family named 'make-dri'"),
        ({"families": []}, "families: none named"),
        ({"split": "test"}, "split: 'test'"),
        ({"per_family": 0}, "per_family: 0"),
    ],
)
def test_bad_arguments_are_errors_and_leave_nothing_behind(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        generate(tmp_path / "s", **arguments)  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


def test_more_instances_than_the_words_give_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = FAMILIES["make-dir"].build
    monkeypatch.setitem(FAMILIES, "make-dir", Family("make-dir", 1, lambda _: build(Draw("same", words_of("train")))))
    with pytest.raises(TaskError, match="make-dir: the vocabulary does not give 2 different tasks"):
        generate(tmp_path / "s", families=["make-dir"], per_family=2)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    generate(tmp_path / "s", families=["make-dir"], per_family=1)
    before = digest(tmp_path / "s")
    with pytest.raises(TaskError, match="not an empty folder"):
        generate(tmp_path / "s", families=["make-dir"], per_family=2)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TaskError, match="file: not an empty folder"):
        generate(tmp_path / "file")
    with pytest.raises(TaskError, match="cannot be written"):
        generate(tmp_path / "file" / "below")
    assert digest(tmp_path / "s") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "s"]
