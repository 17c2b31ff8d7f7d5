"""``termrl train``: settings in, a trained model out."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from termrl.cli.interrupts import INTERRUPTED, Interrupts
from termrl.config import TrainConfig
from termrl.errors import HungError
from termrl.runs.store import RunStore
from termrl.settings import given_toml, load_settings, to_toml

if TYPE_CHECKING:
    from pydantic import BaseModel

    from termrl.training.events import Watcher

SHORT_FORMS = {
    "--sandbox": "--sandbox.backend",
    "--model": "--model.path",
    "--tasks": "--tasks.dir",
    "--skip-broken": "--tasks.skip-broken",
    "--env-url": "--environment.url",
}


def train(
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Annotated[tuple[Path, ...], Parameter(name=["--config", "-c"], negative="")] = (),
    resume: Annotated[Path | None, Parameter(name="--resume")] = None,
    track: Annotated[str | None, Parameter(name="--track")] = None,
    prometheus_port: Annotated[str | None, Parameter(name="--prometheus-port")] = None,
    keys: Annotated[bool, Parameter(name="--keys", negative="")] = False,
) -> int:
    """Train a model on terminal tasks by GRPO.

    Settings come from defaults, then TOML files, then TERMRL_SECTION__KEY variables, then --section.key VALUE.
    The most used: --run-dir DIR, --seed N, --steps N, --model NAME, --tasks DIR, --skip-broken, --sandbox NAME,
    --env-url URL (an OpenEnv server for the environments), --training.lr X, --rollout.groups N.

    Parameters
    ----------
    config
        TOML file; may be given several times, later ones win.
    resume
        Run folder of a run that stopped: goes on from its newest checkpoint, with the settings saved there. Settings
        given beside it must be the same, but for those that no figure depends on (--steps, --track, …).
    track
        Experiment tracker that also gets the figures: wandb, tensorboard, trackio or none.
    prometheus_port
        Serve the run's figures at http://127.0.0.1:PORT/metrics for Prometheus while it lasts.
    keys
        List every setting with its default, and exit.
    """
    console = Console()
    if keys:
        show_keys(console, TrainConfig())
        return 0
    tracking_flags = _tracking_flags(track, prometheus_port)
    flags = [*map(_long, settings), *tracking_flags]
    if resume is not None:
        return _resume(console, resume, config, flags)
    loaded = load_settings(TrainConfig, files=config, environ=os.environ, flags=flags)
    with _figures(loaded.config) as watchers:
        model, pools = _prepare(loaded.config)
        run_dir = _run_dir(loaded.config, config)
        with RunStore.create(run_dir, given=given_toml(loaded), resolved=to_toml(loaded.config)) as store:
            return _run(console, loaded.config, store, watchers, model=model, pools=pools, resume=False)


def _resume(console: Console, run: Path, files: Sequence[Path], flags: Sequence[str]) -> int:
    from termrl.runs.resume import changed_versions, kept_config, resumed_config

    with RunStore.resume(run) as store:
        config = resumed_config(run, files=files, environ=os.environ, flags=flags)
        with _figures(config) as watchers:
            model, pools = _prepare(config)
            store.keep_config(to_toml(kept_config(run, config)))
            for name, (then, now) in changed_versions(store).items():
                _warn(f"{name} was {then or 'absent'}, is {now or 'absent'}: figures may differ from one run's")
            return _run(console, config, store, watchers, model=model, pools=pools, resume=True)


def _tracking_flags(track: str | None, prometheus_port: str | None) -> list[str]:
    """The short flags as settings, so that they are checked and recorded like any other."""
    given = {"track.to": track, "track.prometheus_port": prometheus_port}
    return [f"--{key}={value}" for key, value in given.items() if value is not None]


@contextmanager
def _figures(config: TrainConfig) -> Iterator[Sequence[Watcher]]:
    """Serve the run's figures, and refuse a tracker that cannot work, before anything else is done."""
    from termrl.runs.prometheus import serving
    from termrl.runs.trackers import check_tracker

    check_tracker(config.track.to)
    with serving(config.track) as watchers:
        yield watchers


def _prepare(config: TrainConfig) -> tuple[Path, Any]:
    from termrl.training.local import prepare

    return prepare(config, _warn)


def _run(console: Console, config: TrainConfig, store: RunStore, watchers: Sequence[Watcher], **parts: Any) -> int:
    """Run to the end; Ctrl-C and SIGTERM checkpoint, close every sandbox, sweep, and give their own exit codes."""
    from termrl.cli.display import TrainDisplay, program_name
    from termrl.runs.trackers import tracking
    from termrl.sandboxes.sweep import sweep
    from termrl.training.events import Together
    from termrl.training.local import train as run_training

    program = program_name(sys.argv[0])
    go_on = f"go on with: {program} train --resume {store.path}"
    state = config.sandbox.settings.get("state")
    state_folder = None if state is None else Path(state)

    async def work() -> None:
        interrupts.attach()
        failed = True
        try:
            with TrainDisplay(console, program=program) as display:
                await run_training(config, store, Together([display, *watchers, *tracked]), **parts)
            failed = False
        except HungError as error:
            # the thread that hangs would hold up every orderly end
            interrupts.end_now(error.exit_code, f"termrl: error: {error.message}\n  hint: {go_on}")
        finally:
            interrupts.detach(failed=failed)

    # a tracker closes after the sweep: what it has to send must not keep sandboxes waiting
    with (
        Interrupts(go_on, state=state_folder) as interrupts,
        tracking(config, store.path, resumed=parts["resume"], warn=_warn) as tracked,
    ):
        try:
            asyncio.run(work())
        except (KeyboardInterrupt, asyncio.CancelledError):
            sweep(state_folder)
            print(f"\ninterrupted; {go_on}", file=sys.stderr)
            return interrupts.code or INTERRUPTED
    return 0


def _warn(line: str) -> None:
    print(f"termrl: warning: {line}", file=sys.stderr)


def _long(flag: str) -> str:
    """A flag with its section, where a short form was given."""
    name, equals, value = flag.partition("=")
    return SHORT_FORMS.get(name, name) + equals + value


def _run_dir(config: TrainConfig, files: tuple[Path, ...]) -> Path:
    if config.run_dir is not None:
        return config.run_dir
    name = files[-1].stem if files else "train"
    return Path("runs") / f"{name}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def show_keys(console: Console, config: BaseModel) -> None:
    """Print every setting of ``config`` with its value, which is the default, and its meaning."""
    from pydantic import BaseModel

    table = Table(box=None, pad_edge=False, show_header=True)
    table.add_column("setting", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning", overflow="fold")

    def add(model: BaseModel, prefix: str) -> None:
        for name, info in type(model).model_fields.items():
            value = getattr(model, name)
            if isinstance(value, BaseModel):
                add(value, f"{prefix}{name}.")
            else:
                table.add_row(f"{prefix}{name}", _shown(value), info.description or "")

    add(config, "")
    console.print(table)


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)
