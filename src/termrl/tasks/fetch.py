"""Bringing task folders from a git repository or another folder: chosen, checked, locked, and whole or not at all."""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from termrl.errors import TaskError, TermrlError
from termrl.tasks.folder import entries
from termrl.tasks.git import check_out, without_credentials
from termrl.tasks.load import load_task
from termrl.tasks.lock import LOCK_FILE, Lock, write_lock
from termrl.tasks.task import Task
from termrl.tasks.taskset import TaskSet

FETCH_S = 1800.0

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_URL = re.compile(r"(https?|ssh|git|file)://.+|[\w.-]+@[\w.-]+:.+")
_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024
_DEPTH = 4
_NAMED = 3


@dataclass(frozen=True)
class Known:
    """A public set of tasks; ``ref`` is the version that its makers released."""

    url: str
    ref: str


KNOWN = MappingProxyType(
    {
        "terminal-bench-2": Known(
            "https://github.com/harbor-framework/terminal-bench-2.git", "69671fbaac6d67a7ef0dfec016cc38a64ef7a77c"
        )
    }
)
"""Sets that can be fetched by name."""


@dataclass(frozen=True)
class Source:
    """Where tasks come from: a repository at ``url`` in version ``ref``, or else the folder ``folder`` as it stands."""

    url: str = ""
    ref: str | None = None
    folder: Path | None = None

    @property
    def name(self) -> str:
        """What the lock says; no credentials are in it."""
        return without_credentials(self.url) if self.folder is None else str(self.folder)


@dataclass(frozen=True)
class Filters:
    """Which tasks are wanted; an empty tuple asks for nothing. Within one, any match will do.

    Attributes:
        include, exclude: globs over the task's id or its folder's name.
        difficulty: of ``[metadata] difficulty``.
        image: globs over ``docker_image``; tasks without one match none.
        network: network modes.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    difficulty: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    network: tuple[str, ...] = ()

    def wants(self, task: Task) -> bool:
        """Whether the task is to be kept."""
        difficulty = str(task.metadata.get("difficulty", "")).lower()
        return (
            self.wants_name(task.id, task.path.name)
            and (not self.difficulty or difficulty in {word.lower() for word in self.difficulty})
            and (not self.image or _matches((task.sandbox.image or "",), self.image))
            and (not self.network or task.sandbox.network_mode in self.network)
        )

    def wants_name(self, *names: str) -> bool:
        """Whether a task with these names is to be kept, as far as names go."""
        return (not self.include or _matches(names, self.include)) and not _matches(names, self.exclude)


@dataclass(frozen=True)
class Fetched:
    """What came of a fetch.

    Attributes:
        tasks: what stands in the folder now, without the warnings that it may give.
        lock: its lock.
        unwanted: how many tasks the filters left out.
        refused: name of each folder that is no usable task, and was left out → why.
    """

    tasks: TaskSet
    lock: Lock
    unwanted: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def parse_source(text: str) -> Source:
    """What a user gave as ``NAME``, a git URL or a folder, each with ``@COMMIT`` (or branch, or tag) if wished.

    A folder without a version is taken as it stands, a bare repository in its default branch.

    Raises:
        TaskError: it is none of these.
    """
    place, ref = text, None
    head, at, tail = text.rpartition("@")
    if at and head and _REF.fullmatch(tail) and not Path(text).exists():
        place, ref = head, tail
    if place in KNOWN:
        known = KNOWN[place]
        return Source(known.url, ref or known.ref)
    if _URL.fullmatch(place):
        return Source(place, ref)
    folder = Path(place)
    if not place or not folder.is_dir():
        raise TaskError(
            f"{text}: neither a known set, a git URL nor a folder",
            hint=f"known sets: {', '.join(KNOWN)}; a version is given as NAME@COMMIT",
        )
    if ref is not None or ((folder / "objects").is_dir() and (folder / "HEAD").is_file()):
        return Source(f"file://{folder.resolve()}", ref)
    return Source(folder=folder.resolve())


def fetch(
    source: Source,
    into: Path,
    *,
    filters: Filters | None = None,
    below: str = "",
    force: bool = False,
    submodules: bool = False,
    timeout_s: float = FETCH_S,
    say: Callable[[str], None] = lambda text: None,
) -> Fetched:
    """Write the tasks of ``source`` that the filters want, and their lock, into the folder ``into``.

    The folder appears at once, when all is there; a fetch that fails or is cut short leaves what was there before.
    Folders that are no usable task (see :func:`~termrl.tasks.load.load_task`), and those that hold Git LFS pointers in
    place of files, are left out and named.

    Args:
        into: a folder that is empty or not there yet.
        below: look for tasks only in this folder of the source.
        force: replace what was fetched into ``into`` before; anything that has no lock is refused all the same.
        submodules: bring submodules of the repository too.
        timeout_s: seconds for git.
        say: told in a few words what is being done.

    Raises:
        TaskError: no such source or version, no usable or no wanted tasks in it, or ``into`` is taken.
        TermrlError: git fails, or takes too long; the disk is full.
    """
    into = into.absolute()
    _check_target(into, force=force)
    try:
        with _staging(into) as staging:
            commit = None
            if source.folder is None:
                say(f"fetching {source.name}")
                tree = staging / "repository"
                commit = check_out(source.url, source.ref, tree, submodules=submodules, timeout_s=timeout_s)
            else:
                tree = source.folder
            say("looking at the tasks")
            chosen = _choose(_below(tree, below, source), tree, filters or Filters(), source)
            found = _place(chosen, staging / "tasks", copy=source.folder is not None)
            if not found.tasks:
                raise _nothing(source, found)
            lock = Lock({task.id: task.digest for task in found.tasks.values()}, source.name, commit)
            write_lock(staging / "tasks", lock)
            _publish(staging / "tasks", into, staging / "old")
    except OSError as error:
        raise TermrlError(f"{into}: cannot be written: {error.strerror or error}") from None
    return Fetched(TaskSet.load(into), lock, found.unwanted, found.refused)


@dataclass
class _Chosen:
    folders: list[Path] = field(default_factory=list)
    unwanted: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def _choose(root: Path, tree: Path, filters: Filters, source: Source) -> _Chosen:
    chosen = _Chosen()

    def refuse(folder: Path, why: str) -> None:
        chosen.refused[folder.name] = why.replace(f"{tree.resolve()}/", "").replace(f"{tree}/", "")

    for folder in _task_folders(root):
        if folder.is_symlink():
            refuse(folder, f"{folder}: a link, not a folder")
            continue
        try:
            task = load_task(folder)
        except TaskError as error:
            refuse(folder, error.message)
            continue
        if not filters.wants(task):
            chosen.unwanted += 1
        elif pointers := list(_lfs_pointers(folder)):
            more = f" and {len(pointers) - _NAMED} more" if len(pointers) > _NAMED else ""
            which = f"{', '.join(pointers[:_NAMED])}{more}"
            refuse(folder, f"{folder}: Git LFS pointers in place of files: {which}")
        else:
            chosen.folders.append(folder)
    twice = sorted({a.name for a in chosen.folders if sum(a.name == b.name for b in chosen.folders) > 1})
    if twice:
        same = ", ".join(str(f.relative_to(tree)) for f in chosen.folders if f.name == twice[0])
        raise TaskError(f"{source.name}: several folders are named {twice[0]}: {same}", hint="--below FOLDER takes one")
    return chosen


@dataclass(frozen=True)
class _Placed:
    tasks: dict[str, Task]
    unwanted: int
    refused: dict[str, str]


def _place(chosen: _Chosen, staged: Path, *, copy: bool) -> _Placed:
    """Put the chosen folders into ``staged``; those whose tasks share a name are taken out again."""
    staged.mkdir()
    for folder in chosen.folders:
        if copy:
            shutil.copytree(folder, staged / folder.name, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        else:
            folder.rename(staged / folder.name)
    refused = dict(chosen.refused)
    if not chosen.folders:
        return _Placed({}, chosen.unwanted, refused)
    try:
        tasks = TaskSet.load(staged, skip_broken=True)
    except TaskError as error:
        raise TaskError(error.message.replace(f"{staged}/", "").replace(f"{staged}: ", "")) from None
    for name, why in tasks.broken.items():
        refused[name] = why.replace(f"{staged}/", "")
        shutil.rmtree(staged / name)
    return _Placed(dict(tasks), chosen.unwanted, refused)


def _nothing(source: Source, found: _Placed) -> TaskError:
    lines = [f"{source.name}: no tasks to fetch"]
    if found.unwanted:
        lines.append(f"the filters left out {found.unwanted}")
    lines += [f"{name}: {why}" for name, why in list(found.refused.items())[:_NAMED]]
    if len(found.refused) > _NAMED:
        lines.append(f"and {len(found.refused) - _NAMED} more that are no usable tasks")
    return TaskError("\n".join(lines))


def _below(tree: Path, below: str, source: Source) -> Path:
    root = (tree / below).resolve()
    if not root.is_relative_to(tree.resolve()) or not root.is_dir():
        raise TaskError(f"--below {below}: no such folder in {source.name}")
    return root


def _task_folders(root: Path, depth: int = 0) -> Iterator[Path]:
    """Folders with a task.toml, none below another."""
    if (root / "task.toml").exists():
        yield root
        return
    if depth == _DEPTH or root.is_symlink():
        return
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            yield from _task_folders(path, depth + 1)


def _lfs_pointers(folder: Path) -> Iterator[str]:
    for name, path in entries(folder):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LFS_BYTES:
            continue
        with path.open("rb") as stream:
            if stream.read(len(_LFS)) == _LFS:
                yield name


def _check_target(into: Path, *, force: bool) -> None:
    if not into.exists() and not into.is_symlink():
        return
    if into.is_symlink() or not into.is_dir():
        raise TaskError(f"{into}: there already, and not a folder", hint="name another --into")
    if not any(into.iterdir()):
        return
    if not (into / LOCK_FILE).is_file():
        raise TaskError(
            f"{into}: not empty, and holds no fetched tasks", hint="name another --into, or remove it first"
        )
    if not force:
        raise TaskError(f"{into}: holds fetched tasks already", hint="--force replaces them")


@contextmanager
def _staging(into: Path) -> Iterator[Path]:
    """A folder beside ``into`` that is gone afterwards; what killed processes left of theirs goes first."""
    into.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{into.name}.fetch-"
    for left in [path for path in into.parent.iterdir() if path.name.startswith(prefix)]:
        lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=into.parent))
    lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _publish(staged: Path, into: Path, old: Path) -> None:
    """Put ``staged`` in the place of ``into``."""
    if into.exists():
        into.rename(old)
    try:
        staged.rename(into)
    except OSError:
        if old.exists():
            old.rename(into)
        raise


def _matches(names: Sequence[str], globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)
