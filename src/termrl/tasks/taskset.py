"""A collection of tasks: every Harbor folder below one folder, by id."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from termrl.errors import TaskError
from termrl.tasks.load import load_task
from termrl.tasks.lock import read_lock
from termrl.tasks.task import Task


class TaskSet(Mapping[str, Task]):
    """Tasks by id, in the order of their ids.

    Attributes:
        path: the folder they come from.
        broken: name of each folder that is no usable task → why.
    """

    def __init__(self, tasks: Iterable[Task], *, path: Path, broken: Mapping[str, str] | None = None) -> None:
        self._tasks = {task.id: task for task in sorted(tasks, key=lambda task: task.id)}
        self.path = path
        self.broken = dict(broken or {})

    @classmethod
    def load(cls, path: Path, *, skip_broken: bool = False, locked: bool = True) -> TaskSet:
        """Load every task folder directly below ``path``, or ``path`` itself if it is one.

        Hidden entries and plain files are no tasks. Folders whose tasks share a name are all broken, since
        nothing says which is meant. Where the folder has a lock (:mod:`termrl.tasks.lock`), tasks that are not as
        it says are broken too.

        Args:
            path: the folder.
            skip_broken: leave broken folders out (they stand in ``broken``) rather than refuse the set.
            locked: hold the tasks against the folder's lock.

        Raises:
            TaskError: no such folder, no tasks in it, or broken ones, named one by one.
        """
        folders = _task_folders(path)
        by_id: dict[str, list[tuple[Path, Task]]] = defaultdict(list)
        broken: dict[str, str] = {}
        for folder in folders:
            try:
                task = load_task(folder)
            except TaskError as error:
                broken[folder.name] = error.message
            else:
                by_id[task.id].append((folder, task))
        for name, same in by_id.items():
            if len(same) > 1:
                folder_names = ", ".join(folder.name for folder, _ in same)
                broken.update(
                    {f.name: f"{f}: the name {name} is used by several tasks: {folder_names}" for f, _ in same}
                )
        good = [same[0][1] for same in by_id.values() if len(same) == 1]
        if locked and (lock := read_lock(path)):
            unlocked = lock.complaints({task.id: task.digest for task in good})
            good = [task for task in good if task.id not in unlocked]
            broken = {**{name: f"{path}: {name}: {why}" for name, why in unlocked.items()}, **broken}
        if broken and not (skip_broken and good):
            lines = [f"{path}: {len(broken)} of {len(folders)} tasks are broken", *broken.values()]
            hint = "--skip-broken goes on with the others" if good else None
            raise TaskError("\n".join(lines), hint=hint)
        return cls(good, path=path, broken=broken)

    def __getitem__(self, task_id: str) -> Task:
        return self._tasks[task_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def families(self) -> dict[str, list[Task]]:
        """Tasks by family, families in alphabetical order."""
        groups: dict[str, list[Task]] = defaultdict(list)
        for task in self.values():
            groups[task.family].append(task)
        return dict(sorted(groups.items()))

    @property
    def warnings(self) -> dict[str, tuple[str, ...]]:
        """Warnings by task id, of the tasks that have some."""
        return {task.id: task.warnings for task in self.values() if task.warnings}

    def only(self, ids: Iterable[str]) -> TaskSet:
        """The tasks with these ids.

        Raises:
            TaskError: an id that the set does not hold.
        """
        wanted = list(dict.fromkeys(ids))
        unknown = [task_id for task_id in wanted if task_id not in self._tasks]
        if unknown:
            raise TaskError(f"{self.path}: no task named {', '.join(unknown)}", hint=f"termrl tasks list {self.path}")
        return TaskSet((self._tasks[task_id] for task_id in wanted), path=self.path, broken=self.broken)


def _task_folders(path: Path) -> list[Path]:
    hint = "termrl tasks generate writes the bundled suite"
    try:
        if not path.exists():
            raise TaskError(f"{path}: no such folder", hint=hint)
        if not path.is_dir():
            raise TaskError(f"{path}: a file, not a folder of tasks")
        if (path / "task.toml").exists():
            return [path]
        below = [p for p in sorted(path.iterdir()) if p.is_dir() and not p.name.startswith((".", "__pycache__"))]
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not below:
        raise TaskError(f"{path}: holds no task folders", hint=hint)
    return below
