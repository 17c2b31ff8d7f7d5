"""Fetching from real git repositories and folders: pinned, filtered, and whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from termrl.errors import TaskError, TermrlError
from termrl.tasks import TaskSet
from termrl.tasks.fetch import KNOWN, Fetched, Filters, Source, fetch, parse_source
from termrl.tasks.lock import LOCK_FILE, read_lock
from tests.tasks.helpers import MINIMAL, write_task

SOURCE = Path(__file__).parents[2] / "src"
IMAGE = '[metadata]\ndifficulty = "{}"\n[environment]\ndocker_image = "{}"\nnetwork_mode = "{}"\n'


def git(folder: Path, *arguments: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for role in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{role}_NAME": "a", f"GIT_{role}_EMAIL": "a@b"}
    done = subprocess.run(["git", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(repository: Path) -> str:
    if not (repository / ".git").exists():
        git(repository, "init", "--quiet", "--initial-branch", "main")
    git(repository, "add", "--all", "--force")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "x")
    return git(repository, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two versions of three tasks, the older one tagged."""
    root = tmp_path / "repository"
    write_task(root / "tasks" / "easy-one", toml=IMAGE.format("easy", "public/one:1", "public"))
    write_task(root / "tasks" / "hard-one", toml=IMAGE.format("hard", "public/two:1", "no-network"))
    write_task(root / "tasks" / "plain")
    (root / "README.md").write_text("tasks")
    commit(root)
    git(root, "tag", "--annotate", "--message", "first", "v1")
    write_task(root / "tasks" / "plain", instruction="Do it better.\n")
    commit(root)
    return root


def bring(source: str, into: Path, **options: object) -> Fetched:
    return fetch(parse_source(source), into, **options)  # pyright: ignore[reportArgumentType]


def test_the_default_branch_is_fetched_and_its_commit_locked(repository: Path, tmp_path: Path) -> None:
    url = f"file://{repository}"
    found = bring(url, tmp_path / "out")
    lock = read_lock(tmp_path / "out")
    assert lock == found.lock and lock is not None
    assert (lock.source, lock.commit) == (url, git(repository, "rev-parse", "HEAD"))
    assert lock.tasks == {task.id: task.digest for task in TaskSet.load(repository / "tasks").values()}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["easy-one", "hard-one", "plain", LOCK_FILE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "repository"]


@pytest.mark.parametrize("version", ["v1", "{commit}", "{short}"])
def test_a_version_is_a_tag_or_a_commit_whole_or_short(repository: Path, tmp_path: Path, version: str) -> None:
    first = git(repository, "rev-parse", "v1^{commit}")
    ref = version.format(commit=first, short=first[:9])
    for number, place in enumerate((f"file://{repository}", str(repository))):
        found = bring(f"{place}@{ref}", tmp_path / f"out-{number}")
        assert found.lock.commit == first
        assert found.tasks["plain"].instruction == "Do it."


def test_a_branch_and_a_bare_repository_will_do(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), "bare.git")
    assert bring(str(tmp_path / "bare.git"), tmp_path / "a").tasks["plain"].instruction == "Do it better."
    assert bring(f"{tmp_path}/bare.git@main", tmp_path / "b").lock.commit == git(repository, "rev-parse", "HEAD")


def test_a_folder_is_taken_as_it_stands(repository: Path, tmp_path: Path) -> None:
    write_task(repository / "tasks" / "plain", instruction="Not committed.\n")
    found = bring(str(repository), tmp_path / "out")
    assert found.tasks["plain"].instruction == "Not committed."
    assert (found.lock.source, found.lock.commit) == (str(repository), None)
    assert not list((tmp_path / "out").rglob(".git"))


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (Filters(include=("*-one",)), ["easy-one", "hard-one"]),
        (Filters(include=("*-one",), exclude=("hard*",)), ["easy-one"]),
        (Filters(difficulty=("Easy", "medium")), ["easy-one"]),
        (Filters(image=("public/t*",)), ["hard-one"]),
        (Filters(network=("no-network",)), ["hard-one", "plain"]),
    ],
)
def test_filters_choose_by_name_difficulty_image_and_network(
    repository: Path, tmp_path: Path, filters: Filters, names: list[str]
) -> None:
    found = bring(f"file://{repository}", tmp_path / "out", filters=filters)
    assert list(found.tasks) == names and found.unwanted == 3 - len(names)
    assert list(found.lock.tasks) == names


def test_filters_that_want_nothing_leave_nothing(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="the filters left out 3"):
        bring(f"file://{repository}", tmp_path / "out", filters=Filters(include=("x",)))
    assert not (tmp_path / "out").exists()


def test_fetched_tasks_are_replaced_only_by_force_and_anything_else_never(repository: Path, tmp_path: Path) -> None:
    out, url = tmp_path / "out", f"file://{repository}"
    out.mkdir()
    bring(f"{url}@v1", out)
    with pytest.raises(TaskError, match="holds fetched tasks already"):
        bring(url, out)
    assert bring(url, out, force=True, filters=Filters(include=("plain",))).tasks["plain"].instruction != "Do it."
    assert sorted(path.name for path in out.iterdir()) == ["plain", LOCK_FILE]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(TaskError, match="holds no fetched tasks"):
            bring(url, mine, force=force)
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out", "repository"]


def test_a_failed_fetch_keeps_what_was_there(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = bring(f"file://{repository}", out).lock
    with pytest.raises(TaskError, match="no branch, tag or commit nope"):
        bring(f"file://{repository}@nope", out, force=True)
    with pytest.raises(TaskError, match="no commit 1234567 on any branch or tag"):
        bring(f"file://{repository}@1234567", out, force=True)
    with pytest.raises(TermrlError, match="git fetch"):
        bring(f"file://{tmp_path}/nowhere", out, force=True)
    assert read_lock(out) == before and TaskSet.load(out)


def test_unusable_folders_are_left_out_and_named(repository: Path, tmp_path: Path) -> None:
    tasks = repository / "tasks"
    write_task(tasks / "silent", instruction="")
    write_task(tasks / "leaves")
    (tasks / "leaves" / "tests" / "host").symlink_to("/etc")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5\n"
    write_task(tasks / "large", files={"environment/data.bin": pointer, ".gitattributes": "*.bin filter=lfs -text\n"})
    write_task(tasks / "twin-a", toml='[task]\nname = "o/twin"\n' + MINIMAL)
    write_task(tasks / "twin-b", toml='[task]\nname = "o/twin"\n' + MINIMAL)
    commit(repository)
    found = bring(f"file://{repository}", tmp_path / "out")
    assert list(found.tasks) == ["easy-one", "hard-one", "plain"]
    assert found.refused["silent"] == "tasks/silent/instruction.md: empty"
    assert "the link leaves the task folder (/etc)" in found.refused["leaves"]
    assert found.refused["large"] == "tasks/large: Git LFS pointers in place of files: environment/data.bin"
    assert "the name twin is used by several tasks" in found.refused["twin-a"]
    assert not any(str(tmp_path) in why for why in found.refused.values())
    assert list(TaskSet.load(tmp_path / "out")) == list(found.tasks)


def test_folders_of_one_name_are_told_apart_by_below(repository: Path, tmp_path: Path) -> None:
    write_task(repository / "more" / "plain", instruction="Another.\n")
    commit(repository)
    url = f"file://{repository}"
    with pytest.raises(TaskError, match="several folders are named plain: more/plain, tasks/plain"):
        bring(url, tmp_path / "out")
    assert bring(url, tmp_path / "out", below="more").tasks["plain"].instruction == "Another."
    for below in ("nowhere", "../.."):
        with pytest.raises(TaskError, match="--below"):
            bring(url, tmp_path / "other", below=below)


def test_nothing_that_a_repository_names_is_run(repository: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(f'[core]\nhooksPath = {hook.parent}\n[filter "evil"]\nsmudge = "sh -c \'touch {ran}; cat\'"\n')
    write_task(repository / "tasks" / "plain", files={".gitattributes": "* filter=evil\n"})
    commit(repository)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", str(config))
        bring(f"file://{repository}", tmp_path / "out")
    assert not ran.exists()


def test_submodules_come_only_when_asked_for(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(tmp_path / "module" / "inside")
    commit(tmp_path / "module")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", f"file://{tmp_path}/module", "m")
    commit(repository)
    config = tmp_path / "gitconfig"
    config.write_text("[protocol.file]\nallow = always\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    assert "inside" not in bring(f"file://{repository}", tmp_path / "a").tasks
    assert "inside" in bring(f"file://{repository}", tmp_path / "b", submodules=True).tasks
    assert not list((tmp_path / "b").rglob(".git"))


def test_credentials_of_an_address_stand_in_no_lock_and_no_message(tmp_path: Path) -> None:
    source = parse_source("https://me:hunter2@host.invalid/x.git@v1")
    assert (source.name, source.ref) == ("https://host.invalid/x.git", "v1")
    with pytest.raises(TermrlError) as caught:
        fetch(source, tmp_path / "out")
    assert "hunter2" not in caught.value.message and "host.invalid" in caught.value.message


def test_known_sets_are_pinned_to_their_release() -> None:
    known = KNOWN["terminal-bench-2"]
    assert len(known.ref) == 40
    assert parse_source("terminal-bench-2") == Source(known.url, known.ref)
    assert parse_source("terminal-bench-2@main") == Source(known.url, "main")
    assert parse_source("git@host:org/x.git") == Source("git@host:org/x.git", None)
    assert parse_source("git@host:org/x.git@v2") == Source("git@host:org/x.git", "v2")


@pytest.mark.parametrize("source", ["terminal-bench-9", "ext::sh -c 'touch x'", "--upload-pack=x", "", "./nowhere@v1"])
def test_what_is_no_source_is_refused_before_git_sees_it(source: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="neither a known set, a git URL nor a folder"):
        bring(source, tmp_path / "out")


def test_git_that_takes_too_long_is_ended_with_what_it_started(repository: Path, tmp_path: Path) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\nsleep 300 & echo $! > {tmp_path}/pid\nwait\n")
    slow.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
        with pytest.raises(TermrlError, match="not fetched in time"):
            bring(f"file://{repository}", tmp_path / "out", timeout_s=0.5)
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the child still runs")
    assert not (tmp_path / "out").exists()


def test_what_a_killed_fetch_left_is_gone_after_the_next_one(repository: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "bin" / "git"
    stopped.parent.mkdir()
    stopped.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 300\n")
    stopped.chmod(0o755)
    out = tmp_path / "here" / "out"
    code = f"from termrl.cli import main; main(['tasks', 'fetch', 'file://{repository}', '--into', '{out}'])"
    env = {**os.environ, "PATH": f"{stopped.parent}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert [path.name[:11] for path in out.parent.iterdir()] == [".out.fetch-"]
    bring(f"file://{repository}", out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_the_command_says_what_it_brought_and_what_it_left_out(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from termrl.cli.tasks import app

    write_task(repository / "tasks" / "silent", instruction="")
    head = commit(repository)
    tokens = ["fetch", f"file://{repository}", "--into", str(tmp_path / "out"), "--include", "*-one,silent"]
    app([*tokens, "--network", "public"], result_action="return_value")
    said = capsys.readouterr().out
    assert "left out tasks/silent/instruction.md: empty" in said
    assert f"1 tasks of file://{repository} at {head} in {tmp_path}/out; the filters left out 2; 1 are not us" in said
    with pytest.raises(TaskError, match="--network loud"):
        app([*tokens, "--network", "loud"], result_action="return_value")
