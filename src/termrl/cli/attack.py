"""``termrl attack``: the whole attack suite against any tasks, and what got through."""

from __future__ import annotations

import asyncio
import json as json_module
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from termrl.cli.interrupts import INTERRUPTED, Interrupts
from termrl.config import TrainConfig
from termrl.errors import ConfigError
from termrl.settings import load_settings

if TYPE_CHECKING:
    from termrl.attacks import Attack, AttackResult, TaskProof
    from termrl.tasks.task import Task

_MANY = Parameter(negative="")


def attack(
    tasks: Path | None = None,
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    sandbox: str | None = None,
    only: Annotated[list[str] | None, _MANY] = None,
    task: Annotated[list[str] | None, _MANY] = None,
    slots: Annotated[int, Parameter(name=["--slots", "-n"])] = 4,
    verify_timeout: float | None = None,
    json: Annotated[bool, _MANY] = False,
    list: Annotated[bool, _MANY] = False,
    config: Annotated[tuple[Path, ...], Parameter(name=["--config", "-c"], negative="")] = (),
) -> int:
    """Attack tasks as a policy would that looks for holes, and print what got through.

    Each task is first verified untouched (it must give 0) and after its own solution (1). Then every attack runs in a
    sandbox of its own, through environment, verifier and attribution as in training. Exit code 1 if any attack was
    paid, or if a task is not fit to be tried.

    Parameters
    ----------
    tasks
        A folder of tasks, or one task.
    sandbox
        The backend: bubblewrap or docker; --sandbox.settings.KEY VALUE sets it up, as in termrl train.
    only
        Only this attack, or attacks of this group; can be given several times, or with commas between.
    task
        Only the task of this name; can be given several times.
    slots
        Sandboxes at once.
    verify_timeout
        Seconds that the tests may take under attack; by default five times what they take on the untouched task.
    json
        Print one object instead of a table.
    list
        Print the attacks there are, and run nothing.
    config
        TOML file of termrl train, whose [sandbox], [images] and [verify] are used.
    """
    from termrl.attacks import chosen
    from termrl.tasks import TaskSet

    attacks = chosen([name.strip() for text in only or [] for name in text.split(",") if name.strip()])
    if list:
        for each in attacks:
            print(f"{each.name:<30} {each.group:<10} {each.what}")
        return 0
    if tasks is None:
        raise ConfigError("TASKS: a folder of tasks, or one task, is needed", hint="termrl attack --help")
    if slots < 1:
        raise ConfigError(f"--slots: {slots} is not at least 1")
    flags = [*settings, *([] if sandbox is None else [f"--sandbox.backend={sandbox}"])]
    given = load_settings(TrainConfig, files=config, environ=os.environ, flags=flags).config
    found = TaskSet.load(tasks)
    mine = found.only(task) if task else found
    proofs, code = _run(mine, given, attacks, slots, verify_timeout, quiet=json)
    backend = given.sandbox.backend
    if json:
        print(json_module.dumps(_as_json(backend, attacks, proofs), indent=2))
    elif proofs:
        _show(backend, proofs)
    return code or int(any(proof.unfit or proof.through for proof in proofs))


def _run(
    tasks: Mapping[str, Task],
    config: TrainConfig,
    attacks: Sequence[Attack],
    slots: int,
    verify_s: float | None,
    *,
    quiet: bool,
) -> tuple[Sequence[TaskProof], int]:
    """The proofs, and the exit code of an interruption, after which there are none."""
    from termrl.sandboxes.sweep import sweep

    settings = config.sandbox_settings()
    state = settings.get("state")
    folder = None if state is None else Path(state)

    async def work() -> Sequence[TaskProof]:
        interrupts.attach()
        failed = True
        try:
            proofs = await _prove(tasks, config, settings, attacks, slots, verify_s, quiet=quiet)
            failed = False
            return proofs
        finally:
            interrupts.detach(failed=failed)

    with Interrupts("nothing was kept", state=folder) as interrupts:
        try:
            return asyncio.run(work()), 0
        except (KeyboardInterrupt, asyncio.CancelledError):
            sweep(folder)
            print("interrupted; nothing was kept", file=sys.stderr)
            return [], interrupts.code or INTERRUPTED


async def _prove(
    tasks: Mapping[str, Task],
    config: TrainConfig,
    settings: dict[str, Any],
    attacks: Sequence[Attack],
    slots: int,
    verify_s: float | None,
    *,
    quiet: bool,
) -> Sequence[TaskProof]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from termrl.attacks import prove
    from termrl.sandboxes import open_provider

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with open_provider(config.sandbox.backend, **settings) as provider:
        with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
            bar = progress.add_task("attacks", total=len(tasks) * (1 + len(attacks)))

            def told(proof: TaskProof, result: AttackResult | None) -> None:
                progress.update(bar, advance=1 + (len(attacks) if result is None and proof.unfit else 0))
                if result is None and proof.unfit:
                    progress.console.print(f"{proof.task_id}: {proof.unfit}", highlight=False, markup=False)
                elif result is not None and result.got_through:
                    text = f"{proof.task_id}: {result.attack.name} GOT THROUGH"
                    progress.console.print(text, highlight=False, markup=False)

            rules = config.verify.rules()
            return await prove(tasks, provider, attacks, rules=rules, slots=slots, verify_s=verify_s, told=told)


def _as_json(sandbox: str, attacks: Sequence[Attack], proofs: Sequence[TaskProof]) -> dict[str, object]:
    return {
        "sandbox": sandbox,
        "attacks": len(attacks),
        "holds": not any(proof.unfit or proof.through for proof in proofs),
        "tasks": [
            {
                "task": proof.task_id,
                "unfit": proof.unfit or None,
                "nop": None if proof.nop is None else proof.nop.reward,
                "oracle": None if proof.oracle is None else proof.oracle.reward,
                "got_through": [result.attack.name for result in proof.through],
                "results": [result.as_json() for result in proof.results],
            }
            for proof in proofs
        ],
    }


def _show(sandbox: str, proofs: Sequence[TaskProof]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for proof in proofs:
        if len(proofs) > 1 and not proof.through:
            continue
        table = Table(title=f"{proof.task_id} on {sandbox}", title_justify="left", box=box.SIMPLE)
        for column in ("attack", "reward", "why", "signals", "s"):
            table.add_column(column, justify="right" if column == "s" else "left", no_wrap=column in ("attack", "s"))
        for result in proof.results:
            if len(proofs) == 1 or result.got_through:
                table.add_row(*_row(result))
        console.print(table)
    summary = Table(box=box.SIMPLE)
    for column in ("task", "untouched", "own solution", "attacks", "paid", "no verdict"):
        summary.add_column(column, justify="left" if column == "task" else "right")
    for proof in proofs:
        missing = sum(result.verdict is None or result.verdict.reward is None for result in proof.results)
        oracle = "none" if proof.oracle is None else _number(proof.oracle.reward)
        nop = "" if proof.nop is None else _number(proof.nop.reward)
        paid = f"[bold red]{len(proof.through)}[/]" if proof.through else "0"
        summary.add_row(escape(proof.task_id), nop, oracle, str(len(proof.results)), paid, str(missing))
    console.print(summary)
    for proof in proofs:
        if proof.unfit:
            console.print(f"[red]not tried[/] {escape(proof.task_id)}: {escape(proof.unfit)}", highlight=False)
    through = sum(len(proof.through) for proof in proofs)
    tried = sum(len(proof.results) for proof in proofs)
    console.print(f"{tried} attacks on {len(proofs)} tasks: {through} got through", highlight=False)


def _row(result: AttackResult) -> Sequence[str]:
    from rich.markup import escape

    verdict = result.verdict
    reward = "none" if verdict is None else _number(verdict.reward)
    why = result.error or ("" if verdict is None else str(verdict.cause or "passed"))
    signals = "" if verdict is None else ", ".join(verdict.signals)
    paid = f"[bold red]{reward} GOT THROUGH[/]" if result.got_through else reward
    return result.attack.name, paid, escape(why), escape(signals), f"{result.seconds:.1f}"


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
