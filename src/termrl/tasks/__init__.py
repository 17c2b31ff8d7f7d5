"""Tasks: Harbor folders, validated and frozen.

``config`` is the schema of task.toml, ``load`` reads one folder into a ``task``, ``taskset`` a collection of them;
``seal`` tells what a folder holds and ``lock`` keeps that on disk. ``fetch`` brings tasks from elsewhere, ``generate``
writes the bundled suite first-steps.
"""

from termrl.tasks.env import resolve_env
from termrl.tasks.ignore import excluded_paths
from termrl.tasks.load import load_task
from termrl.tasks.seal import digest
from termrl.tasks.task import Task
from termrl.tasks.taskset import TaskSet

__all__ = ["Task", "TaskSet", "digest", "excluded_paths", "load_task", "resolve_env"]
