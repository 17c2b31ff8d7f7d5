"""Training refuses tasks that no report calls sound, unless it is told to take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from termrl.errors import TaskError
from termrl.tasks.task import Task
from termrl.validation.records import Status, TaskReport, read_report

_NAMED = 10


def check_sound(reports: Sequence[Path], tasks: Mapping[str, Task]) -> None:
    """Return if each task, as it is now, is sound by one of the reports. Without reports nothing is asked.

    Raises:
        TaskError: names the tasks that are not, and why; or a report that cannot be read.
    """
    if unsound := complaints(reports, tasks):
        lines = [f"{len(unsound)} of {len(tasks)} tasks are not known to be sound (tasks.validation)"]
        lines += [f"{name}: {why}" for name, why in list(unsound.items())[:_NAMED]]
        lines += [f"and {len(unsound) - _NAMED} more"] if len(unsound) > _NAMED else []
        hint = "validate them again, leave them out, or set tasks.allow_unsound = true"
        raise TaskError("\n".join(lines), hint=hint)


def complaints(reports: Sequence[Path], tasks: Mapping[str, Task]) -> dict[str, str]:
    """The tasks that no report calls sound as they are now, and why; none where there are no reports.

    Raises:
        TaskError: a report that cannot be read.
    """
    known = [read_report(path).results for path in reports]
    return {
        name: why
        for name, task in tasks.items()
        if known and (why := _complaint(task, [found[name] for found in known if name in found]))
    }


def _complaint(task: Task, found: Iterable[TaskReport]) -> str:
    """Why the task is not known to be sound; empty if it is."""
    about = [report for report in found if report.digest == task.digest]
    if any(report.status is Status.SOUND for report in about):
        return ""
    if about:
        return f"{about[0].status}: {about[0].detail}"
    return "changed since it was validated" if found else "not in the report"
