"""``termrl tasks``: write the bundled suite, list and show task folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from termrl.tasks import Task

app = App(name="tasks", help="Write the bundled tasks; list and show task folders.")


@app.command
def generate(
    directory: Path,
    /,
    *,
    split: Literal["train", "eval"] = "train",
    families: Annotated[list[str] | None, Parameter(negative="")] = None,
    levels: Annotated[list[str] | None, Parameter(negative="")] = None,
    per_family: int = 8,
    seed: int = 0,
) -> None:
    """Write tasks of the bundled suite first-steps as Harbor folders.

    Parameters
    ----------
    directory
        Where to; a new or empty folder.
    split
        Whose words to use; the two splits share none.
    families
        Names of families with commas between, or all; those of level 1 if neither these nor levels are given.
    levels
        Only families of these levels, with commas between: 1 small steps, 2 text, archives and finding, 3 repairs.
    per_family
        Tasks of each family.
    seed
        Which instances; the same arguments write the same bytes.
    """
    from rich.console import Console

    from termrl.tasks.generate import FAMILIES
    from termrl.tasks.generate import generate as write

    names = _parts(families)
    written = write(
        directory,
        split=split,
        families=list(FAMILIES) if names == ["all"] else names,
        levels=_numbers(_parts(levels)),
        per_family=per_family,
        seed=seed,
    )
    Console().print(f"{len(written)} tasks in {directory}", highlight=False, markup=False, soft_wrap=True)


@app.command(name="list")
def list_tasks(directory: Path, /, *, skip_broken: Annotated[bool, Parameter(negative="")] = False) -> None:
    """List the tasks of a folder, and say what is odd or broken about them.

    Parameters
    ----------
    directory
        A folder of Harbor tasks, or one task.
    skip_broken
        List the good ones even if others are broken.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from termrl.tasks import TaskSet

    tasks = TaskSet.load(directory, skip_broken=skip_broken)
    table = Table(box=None, pad_edge=False)
    for column in ("task", "family", "level"):
        table.add_column(column, no_wrap=True)
    table.add_column("instruction")
    for task in tasks.values():
        level = "" if task.level is None else str(task.level)
        table.add_row(*map(escape, (task.id, task.family, level, task.instruction.split("\n", 1)[0])))
    console = Console()
    console.print(table)
    console.print(f"\n{len(tasks)} tasks, {len(tasks.families)} families", highlight=False)
    for lines in tasks.warnings.values():
        for line in lines:
            console.print(f"[yellow]warning[/] {escape(line)}", highlight=False, soft_wrap=True)
    for message in tasks.broken.values():
        console.print(f"[red]broken[/] {escape(message)}", highlight=False, soft_wrap=True)


@app.command
def show(directory: Path, task_id: str, /) -> None:
    """Show one task: its instruction, its settings and its files.

    Parameters
    ----------
    directory
        A folder of Harbor tasks.
    task_id
        The task's name in it.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from termrl.tasks import TaskSet
    from termrl.tasks.folder import entries

    task = TaskSet.load(directory, skip_broken=True).only([task_id])[task_id]
    console = Console()
    console.print(task.instruction, highlight=False, markup=False, soft_wrap=True)
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False)
    agent = "none" if task.agent_timeout_s is None else f"{task.agent_timeout_s:g} s"
    rows = {
        "folder": str(task.path),
        "family": task.family,
        "sandbox": _made_from(task),
        "workdir": task.sandbox.workdir or "the image's own",
        "network": task.sandbox.network_mode,
        "memory, storage": f"{_mib(task.sandbox.memory_mb)}, {_mib(task.sandbox.storage_mb)}",
        "agent limit": agent,
        "tests limit": f"{task.verifier_timeout_s:g} s",
        "tests use the network": "yes" if task.tests_use_network else "no",
        "solution": "yes" if task.solution else "no",
        "files": "\n".join(name for name, path in entries(task.path) if not path.is_dir()),
        "digest": task.digest,
    }
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table, highlight=False)
    for line in task.warnings:
        console.print(f"[yellow]warning[/] {escape(line)}", highlight=False, soft_wrap=True)


def _parts(given: list[str] | None) -> list[str] | None:
    """What is given once with commas between, or several times, as one list; ``None`` if that is nothing."""
    return [part.strip() for text in given or [] for part in text.split(",") if part.strip()] or None


def _numbers(parts: list[str] | None) -> list[int] | None:
    from termrl.errors import TaskError

    try:
        return None if parts is None else [int(part) for part in parts]
    except ValueError:
        raise TaskError(f"levels: {','.join(parts or [])} are not whole numbers with commas between") from None


def _made_from(task: Task) -> str:
    if task.sandbox.host_userland:
        return "host userland"
    return task.sandbox.image or "Dockerfile"


def _mib(size: int | None) -> str:
    return "default" if size is None else f"{size} MiB"
