"""``termrl validate``: which tasks are sound, and what is wrong with the others."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from termrl.cli.interrupts import INTERRUPTED, Interrupts
from termrl.cli.live import LiveDisplay, clock, progress_bar
from termrl.config import TrainConfig
from termrl.errors import TaskError
from termrl.settings import load_settings
from termrl.validation.records import Attempt, Report, Status, TaskReport

if TYPE_CHECKING:
    from termrl.tasks import TaskSet
    from termrl.validation.journal import Journal
    from termrl.validation.study import Follower, Plan

_LOG_LINES = 12
_STYLES = {Status.SOUND: "green", Status.BOOTSTRAP_FAILED: "yellow", Status.INFRASTRUCTURE: "yellow"}


def validate(
    tasks: Path,
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    sandbox: str | None = None,
    concurrency: Annotated[int, Parameter(name=["-n", "--concurrency"])] = 4,
    repeat: int = 2,
    include: Annotated[list[str] | None, Parameter(negative="")] = None,
    exclude: Annotated[list[str] | None, Parameter(negative="")] = None,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    retries: int = 2,
    json: Annotated[bool, Parameter(negative="")] = False,
    config: Annotated[tuple[Path, ...], Parameter(name=["--config", "-c"], negative="")] = (),
) -> int:
    """Try every task: its solution must score 1 and doing nothing 0, each time. Exit code 0 only if all are sound.

    Parameters
    ----------
    tasks
        A folder of Harbor tasks, or one task.
    sandbox
        The backend: bubblewrap or docker; --sandbox.settings.KEY VALUE sets it up, as in termrl train.
    concurrency
        Sandboxes at once.
    repeat
        How often each task is tried, with its solution and without.
    include
        Only tasks whose name matches one of these globs; commas or repeats.
    exclude
        No tasks whose name matches one of these globs.
    output
        Write the report here as JSON; attempts are kept beside it as they come, in REPORT.attempts.jsonl.
    resume
        Go on with the study of that report: only what is missing, has no verdict or changed since is tried.
    retries
        How often an attempt that the machine failed is made again.
    json
        Print the report as JSON instead of a table.
    config
        TOML file of termrl train, whose [sandbox] and [images] are used.
    """
    from termrl.tasks.fetch import Filters
    from termrl.tasks.taskset import TaskSet
    from termrl.validation.study import Plan

    _check_numbers({"-n": (concurrency, 1), "--repeat": (repeat, 1), "--retries": (retries, 0)})
    if resume and output is None:
        raise TaskError("--resume needs -o REPORT, the report of the study to go on with")
    flags = [*settings, *([] if sandbox is None else [f"--sandbox.backend={sandbox}"])]
    given = load_settings(TrainConfig, files=config, environ=os.environ, flags=flags).config
    found = TaskSet.load(tasks, skip_broken=True)
    filters = Filters(include=_parts(include), exclude=_parts(exclude))
    if filters != Filters():
        chosen = [task.id for task in found.values() if filters.wants(task)]
        broken = {name: why for name, why in found.broken.items() if filters.wants_name(name)}
        if not chosen and not broken:
            raise TaskError(f"{tasks}: no task matches --include and --exclude")
        found = TaskSet((found[name] for name in chosen), path=found.path, broken=broken)
    plan = Plan(repeat=repeat, concurrency=concurrency, retries=retries)
    with ExitStack() as stack:
        journal = None
        if output is not None:
            from termrl.validation.journal import Journal

            journal = stack.enter_context(Journal(_journal(output), resume=resume))
        report, code = _run(found, given, plan, journal, quiet=json)
        if report is None:
            return code
        if output is not None:
            report.write(output)
    if json:
        sys.stdout.buffer.write(report.json())
        sys.stdout.buffer.flush()
    else:
        show(Console(), report)
    if output is not None:
        print(f"report: {output}", file=sys.stderr)
    return code or int(not report.sound)


def _run(
    tasks: TaskSet, config: TrainConfig, plan: Plan, journal: Journal | None, *, quiet: bool
) -> tuple[Report | None, int]:
    """Make the study; the report, as far as it came, and the exit code of an interruption."""
    from termrl.sandboxes import open_provider
    from termrl.sandboxes.sweep import sweep
    from termrl.validation.study import Study

    settings = config.sandbox_settings()
    state = settings.get("state")
    state_folder = None if state is None else Path(state)
    kept = "what was tried is kept: --resume goes on with it" if journal else "nothing was kept: -o REPORT would"
    studies: list[Study] = []

    async def work() -> None:
        interrupts.attach()
        failed = True
        try:
            async with open_provider(config.sandbox.backend, **settings) as provider:
                with _Display(Console(stderr=True), quiet=quiet) as display:
                    earlier = journal.usable(tasks, provider.name) if journal else []
                    study = Study(tasks, provider, plan, earlier, display.follower(journal))
                    studies.append(study)
                    await study.run()
            failed = False
        finally:
            interrupts.detach(failed=failed)

    with Interrupts(kept, state=state_folder) as interrupts:
        try:
            asyncio.run(work())
        except (KeyboardInterrupt, asyncio.CancelledError):
            sweep(state_folder)
            print(f"\ninterrupted; {kept}", file=sys.stderr)
            return studies[0].report() if studies else None, interrupts.code or INTERRUPTED
    return studies[0].report(), 0


class _Display(LiveDisplay):
    """What goes on: a line for each task that is not sound as it is found, and on a terminal a live line below."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        super().__init__(console)
        self._quiet = quiet
        self._total = self._done = self._tasks = self._retries = 0
        self._found: Counter[bool] = Counter()
        self._since = time.monotonic()
        self._last = ""

    def __enter__(self) -> Self:
        return self if self._quiet else super().__enter__()

    def follower(self, journal: Journal | None) -> Follower:
        """What tells this display, and the journal, what happens."""
        from termrl.validation.study import Follower

        def attempt(made: Attempt) -> None:
            if journal is not None:
                journal.add(made)
            self._done += 1
            self._retries += len(made.retried)

        return Follower(self._planned, self._started, attempt, self._task)

    def _planned(self, attempts: int, kept: int) -> None:
        self._total = attempts
        if kept and not self._quiet:
            self._print(f"{kept} attempts are kept from before, {attempts} are to be made")

    def _started(self, task_id: str) -> None:
        self._last = task_id

    def _task(self, task_id: str, report: TaskReport) -> None:
        sound = report.status is Status.SOUND
        self._found[sound] += 1
        if not sound and not self._quiet:
            self._print(f"{task_id}: {_words(report.status)}: {report.detail.splitlines()[0] if report.detail else ''}")

    def _status(self) -> list[str]:
        elapsed = time.monotonic() - self._since
        parts = [f" {progress_bar(self._done, self._total)} {self._done}/{self._total} attempts"]
        parts.append(f"{self._found[True]} sound, {self._found[False]} not")
        if self._retries:
            parts.append(f"{self._retries} retries")
        parts.append(f"{elapsed:.0f} s")
        if self._done:
            parts.append(f"about {clock(elapsed / self._done * (self._total - self._done))} left")
        parts.append(self._last)
        return parts


def show(console: Console, report: Report) -> None:
    """Print a report as tables."""
    table = Table(box=None, pad_edge=False, caption="mean seconds", caption_justify="left")
    table.add_column("task", overflow="fold")
    for column in ("status", "oracle", "untouched"):
        table.add_column(column, no_wrap=True)
    for column in ("start", "solve", "tests", "KiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in sorted(report.results.items()):
        status = f"[{_STYLES.get(found.status, 'red')}]{_words(found.status)}[/]"
        times = (f"{value:.2f}" if value else "" for value in (found.start_s, found.solve_s, found.verify_s))
        size = f"{found.size_bytes / 1024:.0f}" if found.size_bytes else ""
        table.add_row(escape(name), status, _scores(found.oracle), _scores(found.nop), *times, size)
    console.print(table)
    for name, found in sorted(report.results.items()):
        if found.status is not Status.SOUND:
            console.print(f"[bold]{escape(name)}[/]: {_words(found.status)}", highlight=False)
            _indented(console, found.detail.splitlines())
            lines = found.log_tail.splitlines()
            _indented(console, lines[-_LOG_LINES:], prefix="  | ")
    counts = ", ".join(f"{count} {_words(status)}" for status, count in report.counts.items())
    retries = sum(found.retries for found in report.results.values())
    again = f"; {retries} attempts were made again for the machine's sake" if retries else ""
    console.print(f"{counts or 'nothing tried'} in {report.wall_s:.1f} s on {report.sandbox}{again}", highlight=False)
    if report.stopped:
        console.print(f"[red]stopped[/] {escape(report.stopped)}", highlight=False, soft_wrap=True)
    if not report.complete:
        console.print("not every task was tried", highlight=False)


def _indented(console: Console, lines: list[str], prefix: str = "  ") -> None:
    for line in lines:
        console.print(prefix + line, highlight=False, markup=False, soft_wrap=True)


def _scores(rewards: tuple[float | None, ...]) -> str:
    return " ".join("–" if reward is None else f"{reward:g}" for reward in rewards)


def _words(status: Status) -> str:
    return str(status).replace("_", " ")


def _journal(output: Path) -> Path:
    return output.with_name(f"{output.name}.attempts.jsonl")


def _parts(given: list[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for text in given or [] for part in text.split(",") if part.strip())


def _check_numbers(given: dict[str, tuple[int, int]]) -> None:
    for name, (value, least) in given.items():
        if value < least:
            raise TaskError(f"{name} {value}: at least {least}")
