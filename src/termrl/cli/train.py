"""``termrl train``: settings in, a trained model out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from termrl.config import TrainConfig
from termrl.errors import ConfigError
from termrl.runs.store import RunStore
from termrl.settings import Loaded, load_settings, to_toml

if TYPE_CHECKING:
    from termrl.training.events import Watcher

INTERRUPTED = 130
TERMINATED = 143

SHORT_FORMS = {
    "--sandbox": "--sandbox.backend",
    "--model": "--model.path",
    "--tasks": "--tasks.dir",
    "--skip-broken": "--tasks.skip-broken",
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
    --training.lr X, --rollout.groups N.

    Parameters
    ----------
    config
        TOML file; may be given several times, later ones win.
    resume
        Run folder of a run that stopped: goes on from its newest checkpoint, with the settings saved there.
    track
        Experiment tracker that also gets the figures: wandb, tensorboard, trackio or none.
    prometheus_port
        Serve the run's figures at http://127.0.0.1:PORT/metrics for Prometheus while it lasts.
    keys
        List every setting with its default, and exit.
    """
    console = Console()
    if keys:
        show_keys(console)
        return 0
    tracking_flags = _tracking_flags(track, prometheus_port)
    if resume is not None:
        if settings or config:
            raise ConfigError(
                "--resume takes the run's own settings: give no others beside it",
                hint="only where figures go may differ: --track, --prometheus-port",
            )
        with RunStore.resume(resume) as store:
            saved = load_settings(TrainConfig, files=[resume / "config.toml"], flags=tracking_flags)
            with _figures(saved.config) as watchers:
                model, pools = _prepare(saved.config)
                return _run(console, saved.config, store, watchers, model=model, pools=pools, resume=True)
    flags = [*map(_long, settings), *tracking_flags]
    loaded = load_settings(TrainConfig, files=config, environ=os.environ, flags=flags)
    with _figures(loaded.config) as watchers:
        model, pools = _prepare(loaded.config)
        run_dir = _run_dir(loaded.config, config)
        with RunStore.create(run_dir, given=_given(loaded), resolved=_resolved(loaded)) as store:
            return _run(console, loaded.config, store, watchers, model=model, pools=pools, resume=False)


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

    return prepare(config)


def _run(console: Console, config: TrainConfig, store: RunStore, watchers: Sequence[Watcher], **parts: Any) -> int:
    """Run to the end; Ctrl-C and SIGTERM checkpoint, close every sandbox, sweep, and give their own exit codes."""
    from termrl.cli.display import TrainDisplay, program_name
    from termrl.runs.trackers import tracking
    from termrl.training.events import Together
    from termrl.training.local import train as run_training

    program = program_name(sys.argv[0])
    terminated = False

    async def work() -> None:
        nonlocal terminated
        this = asyncio.current_task()
        assert this is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            this.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        with TrainDisplay(console, program=program) as display:
            await run_training(config, store, Together([display, *watchers, *tracked]), **parts)

    # a tracker closes after the sweep: what it has to send must not keep sandboxes waiting
    with tracking(config, store.path, resumed=parts["resume"], warn=_warn) as tracked:
        try:
            asyncio.run(work())
        except (KeyboardInterrupt, asyncio.CancelledError):
            _sweep()
            print(f"\ninterrupted; go on with: {program} train --resume {store.path}", file=sys.stderr)
            return TERMINATED if terminated else INTERRUPTED
    return 0


def _warn(line: str) -> None:
    print(f"termrl: warning: {line}", file=sys.stderr)


def _sweep() -> None:
    from termrl.sandboxes.sweep import sweep

    sweep()


def _long(flag: str) -> str:
    """A flag with its section, where a short form was given."""
    name, equals, value = flag.partition("=")
    return SHORT_FORMS.get(name, name) + equals + value


def _run_dir(config: TrainConfig, files: tuple[Path, ...]) -> Path:
    if config.run_dir is not None:
        return config.run_dir
    name = files[-1].stem if files else "train"
    return Path("runs") / f"{name}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _given(loaded: Loaded[TrainConfig]) -> str:
    lines = [f"# {'.'.join(key)}: {source}" for key, source in loaded.sources.items()]
    return "\n".join(["# where each setting came from", *lines, "", to_toml(loaded.given)])


def _resolved(loaded: Loaded[TrainConfig]) -> str:
    return to_toml(loaded.config)


def show_keys(console: Console) -> None:
    """Print every setting of :class:`~termrl.config.TrainConfig` with its default and meaning."""
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

    add(TrainConfig(), "")
    console.print(table)


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)
