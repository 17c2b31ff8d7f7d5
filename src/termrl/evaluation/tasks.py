"""The tasks of an evaluation: a folder's, or those of the bundled suite."""

from __future__ import annotations

import shutil
from pathlib import Path

from termrl.errors import TaskError
from termrl.evaluation.config import EvalTasksConfig
from termrl.tasks.fetch import Filters
from termrl.tasks.generate import choose_families, generate
from termrl.tasks.task import Task
from termrl.tasks.taskset import TaskSet

Tasks = dict[str, Task]


def check_suite(config: EvalTasksConfig) -> None:
    """Refuse families and levels that the bundled suite does not have, before anything is written.

    Raises:
        TaskError: with a suggestion.
    """
    if config.dir is None:
        choose_families(config.families or None, config.levels or None)


def folder_tasks(config: EvalTasksConfig) -> Tasks:
    """The chosen tasks of the folder, by id, in the order of their ids.

    Raises:
        TaskError: no such folder, broken tasks, or none that is chosen.
    """
    assert config.dir is not None
    found = TaskSet.load(config.dir, skip_broken=config.skip_broken)
    filters = Filters(include=config.include, exclude=config.exclude)
    chosen = {
        name: task
        for name, task in found.items()
        if filters.wants(task)
        and (not config.levels or task.level in config.levels)
        and (not config.families or task.family in config.families)
    }
    if not chosen:
        raise TaskError(f"{config.dir}: no task is chosen by --include, --exclude, --level and --families")
    return chosen


def suite_tasks(config: EvalTasksConfig, folder: Path) -> Tasks:
    """Write the bundled suite's tasks to ``folder``, in place of what is there, and load the chosen ones.

    Raises:
        TaskError: no such family or level, or none is chosen.
    """
    shutil.rmtree(folder, ignore_errors=True)
    generate(
        folder,
        split=config.split,
        families=config.families or None,
        levels=config.levels or None,
        per_family=config.per_family,
        seed=config.seed,
    )
    return folder_tasks(config.model_copy(update={"dir": folder, "levels": (), "families": ()}))
