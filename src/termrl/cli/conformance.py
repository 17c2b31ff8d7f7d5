"""``termrl doctor --sandbox``: the conformance suite on the terminal or as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from termrl.errors import ConfigError
from termrl.sandboxes import open_provider
from termrl.sandboxes.base import RESOURCES
from termrl.sandboxes.conformance import CHECKS, Check, Outcome, Subject, run_checks
from termrl.sandboxes.conformance.check import small_spec

_AT_ONCE = 4
_WORDS = {"holds": "[green]holds[/]", "fails": "[bold red]FAILS[/]", "skipped": "[yellow]skipped[/]"}


def conform(
    backend: str, settings: Mapping[str, Any], *, only: Sequence[str], as_json: bool, image: str | None = None
) -> int:
    """Run the suite, or the checks named ``only``, and print how it went; 1 if any check fails.

    Args:
        settings: what the backend is opened with, values that JSON can hold.
        image: what sandboxes are made from, for a backend that needs one.

    Raises:
        ConfigError: no such backend or check.
        SandboxStartError: this machine lacks what the backend needs.
    """
    checks = _chosen(only)
    outcomes, limits = asyncio.run(_run(backend, settings, checks, image, quiet=as_json))
    failed = [outcome for outcome in outcomes if outcome.state == "fails"]
    kept = {resource: _kept(resource, outcomes) for resource in RESOURCES}
    if as_json:
        bounds = {name: {"by": limits.get(name), "holds": kept[name]} for name in RESOURCES}
        found = {"backend": backend, "holds": not failed, "limits": bounds}
        print(json.dumps({**found, "checks": [outcome.as_json() for outcome in outcomes]}, indent=2))
    else:
        _show(backend, outcomes, limits, kept)
    return 1 if failed else 0


def _chosen(only: Sequence[str]) -> list[Check]:
    by_name = {check.name: check for check in CHECKS}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        close = difflib.get_close_matches(unknown[0], by_name, n=1)
        hint = f"did you mean {close[0]}?" if close else "termrl doctor --sandbox NAME lists them"
        raise ConfigError([f"--check: there is no check {name}" for name in unknown], hint=hint)
    return [by_name[name] for name in only] or list(CHECKS)


async def _run(
    backend: str, settings: Mapping[str, Any], checks: Sequence[Check], image: str | None, *, quiet: bool
) -> tuple[list[Outcome], dict[str, str]]:
    outcomes = []
    async with open_provider(backend, **settings) as provider:
        spec = replace(small_spec(), host_userland=False, image=image) if image else small_spec()
        subject = Subject(provider, spec, backend=backend, settings=settings)
        with _progress(len(checks), quiet=quiet) as say:
            async for outcome in run_checks(subject, checks, at_once=_AT_ONCE):
                outcomes.append(outcome)
                say(outcome, len(outcomes))
        outcomes.sort(key=lambda outcome: checks.index(outcome.check))
        return outcomes, dict(provider.limits)


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Any]:
    """Yields what to call after each check."""
    if quiet:
        yield lambda *_: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{total} checks") as status:
        yield lambda outcome, done: status.update(f"{done} of {total} checks, last: {outcome.check.name}")


def _kept(resource: str, outcomes: Sequence[Outcome]) -> bool | None:
    """Whether all checks of a limit hold; ``None`` if none of them could be run."""
    states = [outcome.state for outcome in outcomes if outcome.check.limit == resource]
    if "fails" in states:
        return False
    return True if "holds" in states else None


def _show(backend: str, outcomes: Sequence[Outcome], limits: dict[str, str], kept: dict[str, bool | None]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=f"{backend}: conformance", title_justify="left", box=box.SIMPLE)
    for column in ("", "check", "what must hold", "s"):
        table.add_column(column, justify="right" if column == "s" else "left", no_wrap=column != "what must hold")
    section = None
    for outcome in outcomes:
        check = outcome.check
        if check.section != section:
            section = check.section
            table.add_section()
            table.add_row("", f"[bold]{section}[/]")
        what = escape(check.what) + (f"\n[bold]→ {escape(outcome.detail)}[/]" if outcome.detail else "")
        table.add_row(_WORDS[outcome.state], check.name, what, f"{outcome.seconds:.1f}")
    console.print(table)
    bounds = Table(title="what bounds a sandbox here", title_justify="left", box=box.SIMPLE)
    for column in ("resource", "by", "put to the test"):
        bounds.add_column(column)
    words = {True: "[green]holds[/]", False: "[bold red]DOES NOT HOLD[/]", None: "not checked"}
    for resource in RESOURCES:
        bounds.add_row(resource, limits.get(resource, "[yellow]nothing[/]"), words[kept[resource]])
    console.print(bounds)
    count = {word: sum(outcome.state == word for outcome in outcomes) for word in _WORDS}
    console.print(f"{count['holds']} hold, {count['fails']} fail, {count['skipped']} skipped")
