"""``termrl train``: settings in, a trained model out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from termrl.config import TrainConfig
from termrl.errors import ConfigError
from termrl.runs.store import RunStore
from termrl.settings import Loaded, load_settings, to_toml

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
    keys
        List every setting with its default, and exit.
    """
    console = Console()
    if keys:
        show_keys(console)
        return 0
    if resume is not None:
        if settings or config:
            raise ConfigError("--resume takes the run's own settings: give no others beside it")
        with RunStore.resume(resume) as store:
            saved = load_settings(TrainConfig, files=[resume / "config.toml"])
            from termrl.training.local import prepare

            model, pools = prepare(saved.config)
            return _run(console, saved.config, store, model=model, pools=pools, resume=True)
    loaded = load_settings(TrainConfig, files=config, environ=os.environ, flags=[_long(flag) for flag in settings])
    from termrl.training.local import prepare

    model, pools = prepare(loaded.config)
    with RunStore.create(_run_dir(loaded.config, config), given=_given(loaded), resolved=_resolved(loaded)) as store:
        return _run(console, loaded.config, store, model=model, pools=pools, resume=False)


def _run(console: Console, config: TrainConfig, store: RunStore, **parts: Any) -> int:
    """Run to the end; Ctrl-C and SIGTERM checkpoint, close every sandbox, sweep, and give their own exit codes."""
    from termrl.cli.display import TrainDisplay, program_name
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
            await run_training(config, store, display, **parts)

    try:
        asyncio.run(work())
    except (KeyboardInterrupt, asyncio.CancelledError):
        _sweep()
        print(f"\ninterrupted; go on with: {program} train --resume {store.path}", file=sys.stderr)
        return TERMINATED if terminated else INTERRUPTED
    return 0


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
