"""``termrl tasks``: fetch tasks or write the bundled suite; list, show and lock task folders; prompt rows for miles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from rich.console import Console

    from termrl.tasks import Task

app = App(name="tasks", help="Fetch tasks or write the bundled ones; list, show and lock them; write prompt rows.")

_Several = Annotated[list[str] | None, Parameter(negative="")]
_Flag = Annotated[bool, Parameter(negative="")]


@app.command
def generate(
    directory: Path,
    /,
    *,
    split: Literal["train", "eval"] = "train",
    families: _Several = None,
    levels: _Several = None,
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


@app.command
def fetch(
    source: str,
    /,
    *,
    into: Path,
    include: _Several = None,
    exclude: _Several = None,
    difficulty: _Several = None,
    image: _Several = None,
    network: _Several = None,
    below: str = "",
    force: _Flag = False,
    submodules: _Flag = False,
    timeout: float = 1800.0,
) -> None:
    """Bring tasks from a git repository or a folder, with a lock of their digests. Filters take commas or repeats.

    Parameters
    ----------
    source
        terminal-bench-2, a git URL or a folder; with @COMMIT, @BRANCH or @TAG for that version of it.
    into
        Where to; a new or empty folder.
    include
        Only tasks whose name matches one of these globs.
    exclude
        No tasks whose name matches one of these globs.
    difficulty
        Only tasks of these difficulties, such as easy,medium.
    image
        Only tasks whose docker_image matches one of these globs.
    network
        Only tasks that need this of the network: public, no-network or allowlist.
    below
        Look only in this folder of the source.
    force
        Replace the tasks that were fetched there before.
    submodules
        Bring the repository's submodules too.
    timeout
        Seconds for git.
    """
    from rich.console import Console

    from termrl.tasks.fetch import Filters, parse_source
    from termrl.tasks.fetch import fetch as bring

    wanted = {"include": include, "exclude": exclude, "difficulty": difficulty, "image": image, "network": network}
    filters = Filters(**{name: tuple(_parts(given) or ()) for name, given in wanted.items()})
    _check_modes(filters.network)
    console, errors = Console(), Console(stderr=True)
    with errors.status("") as status:
        fetched = bring(
            parse_source(source),
            into,
            filters=filters,
            below=below,
            force=force,
            submodules=submodules,
            timeout_s=timeout,
            say=status.update,
        )
    _warn(console, "left out", fetched.refused.values())
    for lines in fetched.tasks.warnings.values():
        _warn(console, "warning", lines)
    version = f" at {fetched.lock.commit}" if fetched.lock.commit else ""
    rest = f"; the filters left out {fetched.unwanted}" if fetched.unwanted else ""
    broken = f"; {len(fetched.refused)} are not usable" if fetched.refused else ""
    line = f"{len(fetched.tasks)} tasks of {fetched.lock.source}{version} in {into}{rest}{broken}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command
def lock(directory: Path, /) -> None:
    """Write the digests of a folder's tasks into its lock, so that a task that changes later is refused.

    Parameters
    ----------
    directory
        A folder of Harbor tasks.
    """
    from rich.console import Console

    from termrl.tasks import TaskSet
    from termrl.tasks.lock import Lock, read_lock, write_lock

    found = {task.id: task.digest for task in TaskSet.load(directory, locked=False).values()}
    before = read_lock(directory) or Lock()
    kept = all(before.tasks.get(name) == digest for name, digest in found.items())
    # what was changed or added is not what that version of the source holds
    after = Lock(found, before.source, before.commit) if kept else Lock(found)
    write_lock(directory, after)
    changed = sum(name in before.tasks and before.tasks[name] != digest for name, digest in found.items())
    new, gone = len(found.keys() - before.tasks.keys()), len(before.tasks.keys() - found.keys())
    line = f"{len(found)} tasks locked in {directory}: {new} new, {changed} changed, {gone} gone"
    Console().print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(name="list")
def list_tasks(directory: Path, /, *, skip_broken: _Flag = False) -> None:
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
        _warn(console, "warning", lines)
    _warn(console, "broken", tasks.broken.values())


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
    _warn(console, "warning", task.warnings)


@app.command(name="rows")
def write_rows(
    directory: Path,
    results: Path | None = None,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    n: int | None = None,
    include: _Several = None,
    exclude: _Several = None,
    difficulty: _Several = None,
    split: Literal["train", "eval"] | None = None,
    eval_share: float = 0.2,
    band: str | None = None,
    validation: Annotated[tuple[Path, ...], Parameter(negative="")] = (),
    opening: str = "terminal-bench",
    skip_broken: _Flag = False,
) -> None:
    """Write prompt data for miles: one JSON line for each task. Filters take commas or repeats.

    Parameters
    ----------
    directory
        A folder of Harbor tasks.
    results
        With --band: what termrl eval measured, as results.jsonl or run folder.
    output
        The file, such as train.jsonl; replaced if it is there.
    n
        Only the first so many.
    include
        Only tasks whose name matches one of these globs.
    exclude
        No tasks whose name matches one of these globs.
    difficulty
        Only tasks of these difficulties, such as easy,medium.
    split
        Only this part: as task.toml says ([metadata] split), else by a hash of the name.
    eval_share
        How much of what is split by the hash is eval.
    band
        Only tasks whose measured pass rate lies in it, such as 0.1-0.9; tasks that were not measured are left out.
    validation
        Leave out tasks that these reports of termrl validate do not call sound.
    opening
        How each conversation begins: terminal-bench (the rules in full) or first-steps (with demonstrations).
    skip_broken
        Leave broken task folders out and go on with the others.
    """
    from rich.console import Console

    from termrl.agent.prompts import opening as opening_of
    from termrl.errors import ConfigError, TaskError
    from termrl.integrations.miles import rows
    from termrl.tasks import TaskSet
    from termrl.tasks.fetch import Filters
    from termrl.validation.gate import complaints

    if (band is None) != (results is None):
        raise ConfigError("--band and RESULTS go together", hint="termrl tasks rows TASKS RUN -o FILE --band 0.1-0.9")
    begins = opening_of(opening)
    given = {"include": include, "exclude": exclude, "difficulty": difficulty}
    filters = Filters(**{name: tuple(_parts(wanted) or ()) for name, wanted in given.items()})
    wanted = {
        task.id: task for task in TaskSet.load(directory, skip_broken=skip_broken).values() if filters.wants(task)
    }
    choice = rows.choose(
        wanted,
        split=split,
        eval_share=eval_share,
        unsound=complaints(validation, wanted),
        band=None if band is None else rows.Band.of(band),
        rates=None if results is None else rows.pass_rates(results),
        n=n,
    )
    for task_id, why in choice.left_out.items():
        _warn(Console(stderr=True), "left out", [f"{task_id}: {why}"])
    if not choice.tasks:
        raise TaskError(f"{directory}: no task is left to write a row for")
    rows.write_rows(output, choice.tasks, begins)
    rest = f"; {len(choice.left_out)} left out" if choice.left_out else ""
    Console().print(f"{len(choice.tasks)} rows in {output}{rest}", highlight=False, markup=False, soft_wrap=True)


def _warn(console: Console, word: str, lines: Iterable[str]) -> None:
    from rich.markup import escape

    style = "yellow" if word == "warning" else "red"
    for line in lines:
        console.print(f"[{style}]{word}[/] {escape(line)}", highlight=False, soft_wrap=True)


def _check_modes(modes: Iterable[str]) -> None:
    from termrl.errors import TaskError
    from termrl.sandboxes.base import NETWORK_MODES

    if unknown := [mode for mode in modes if mode not in NETWORK_MODES]:
        raise TaskError(f"--network {','.join(unknown)}: there are {', '.join(NETWORK_MODES)}")


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
