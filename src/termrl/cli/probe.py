"""``termrl probe``: a smoke test of any OpenEnv server, on the terminal or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from termrl.environment.probe import Probe

app = App(name="probe", help="Smoke-test an OpenEnv server: does it work, how fast, how many sessions.")


@app.default
def probe(
    url: str,
    /,
    *,
    token_file: Path | None = None,
    task: str | None = None,
    sessions: int = 8,
    rounds: int = 20,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Smoke-test an OpenEnv server: health, schema, open, reset, steps, state, close, then several sessions at once.

    Exit codes: 0 usable, 2 bad arguments or token, 3 nobody answers, 4 no session was admitted, 5 something failed.

    Parameters
    ----------
    url
        http://HOST:PORT (or https, ws, wss) of the server.
    token_file
        File with the bearer token; else $TERMRL_TOKEN, if set.
    task
        Task to reset to; else the server's own choice.
    sessions
        How many sessions to ask for at once; 0 leaves that out.
    rounds
        How often each step is taken.
    as_json
        Print one JSON object.
    """
    import asyncio
    import json

    from termrl.environment.address import read_token
    from termrl.environment.client import ClientOptions
    from termrl.environment.probe import probe as run
    from termrl.errors import ConfigError

    if sessions < 0 or rounds < 1:
        raise ConfigError("--sessions must be at least 0 and --rounds at least 1")
    options = ClientOptions(token=read_token(token_file))
    found = asyncio.run(run(url, options=options, task_id=task, sessions=sessions, rounds=rounds))
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)
    return found.exit_code


def _show(found: Probe) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{found.url}: {found.kind} environment", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("times", "median ms", "p95 ms"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for stage in found.stages:
        what = f"[bold red]{escape(stage.error)}[/]" if stage.error else escape(stage.note)
        table.add_row(stage.name, str(stage.count), _ms(stage.median_ms), _ms(stage.p95_ms), what)
    console = Console()
    console.print(table)
    failed = found.failed
    console.print("usable" if failed is None else f"NOT USABLE: {failed.name}", highlight=False, markup=False)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
