"""May a run go on with these settings? Only those that no figure depends on may differ from the saved ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from termrl.config import TrainConfig
from termrl.errors import ConfigError, RunError
from termrl.rollout.pools import tasks_per_family
from termrl.runs.store import RunStore, versions
from termrl.settings import load_settings
from termrl.training import checkpoints

_ENVIRONMENT = (
    *("url", "serve", "token_file", "capacity_wait_s", "connect_timeout_s", "reset_s", "grace_s"),
    *("ping_interval_s", "ping_timeout_s"),
)

FREE = (
    *("steps", "max_wall_s", "track.", "checkpoint.", "stop.", "episode.reset_s", "episode.grace_s", "rollout.retries"),
    *(f"environment.{name}" for name in _ENVIRONMENT),
)
"""Settings that may differ in a resumed run: by name, or, ending in a dot, by section."""

_NOT_KEPT = ("track",)


def resumed_config(
    run: Path, *, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None, flags: Sequence[str] = ()
) -> TrainConfig:
    """The config that a run goes on with: the saved one, and over it what is given.

    Args:
        run: the run's folder.
        files, environ, flags: as for :func:`termrl.settings.load_settings`.

    Raises:
        ConfigError: bad settings, or ones that would change the run; every such key with the old and the new value.
    """
    source = run / "config.toml"
    saved = load_settings(TrainConfig, files=[source]).config
    loaded = load_settings(TrainConfig, files=[source, *files], environ=environ, flags=flags)
    if loaded.config.run_dir is not None and loaded.sources.get(("run_dir",)) != str(source):
        _check_folder(run, loaded.config.run_dir)
    config = loaded.config.model_copy(update={"run_dir": saved.run_dir})
    refuse_changes(run, saved, config, free=FREE)
    done = _steps_done(run)
    if config.steps < done:
        raise ConfigError(f"{run}: steps = {config.steps}, but {done} are done already")
    return _with_the_same_tasks(saved, config)


def refuse_changes(run: Path, saved: BaseModel, config: BaseModel, *, free: Sequence[str]) -> None:
    """Return if ``config`` differs from the ``saved`` one of ``run`` in ``free`` settings only.

    Args:
        free: by name, or, ending in a dot, by section.

    Raises:
        ConfigError: every other setting that differs, with the old and the new value.
    """
    refused = {key: values for key, values in differences(saved, config).items() if not _is_free(key, free)}
    if refused:
        raise ConfigError(
            [f"{run}: {key} would change: {_shown(old)} → {_shown(new)}" for key, (old, new) in refused.items()],
            hint="a run goes on with the settings it began with; another --run-dir starts a new one. Free to differ: "
            + ", ".join(f"{key}*" if key.endswith(".") else key for key in free),
        )


def kept_config(run: Path, config: TrainConfig) -> TrainConfig:
    """What of a resumed run's config later resumes begin with: all but where figures are sent this time."""
    saved = load_settings(TrainConfig, files=[run / "config.toml"]).config
    return config.model_copy(update={name: getattr(saved, name) for name in _NOT_KEPT})


def differences(old: BaseModel, new: BaseModel, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The settings that differ, by dotted name, as (old, new). Two paths to one place are no difference."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            found |= differences(before, after, f"{prefix}{name}.")
        elif before != after and not _same_place(before, after):
            found[f"{prefix}{name}"] = (before, after)
    return found


def changed_versions(store: RunStore) -> dict[str, tuple[str | None, str | None]]:
    """Libraries that are not those that the run began with, as (then, now)."""
    then, now = store.versions(), versions()
    return {name: (then.get(name), now.get(name)) for name in sorted({*then, *now}) if then.get(name) != now.get(name)}


def _check_folder(run: Path, given: Path) -> None:
    if not _same_place(run, given):
        raise ConfigError(f"run_dir is {given}, but --resume is {run}", hint="give --resume alone")


def _with_the_same_tasks(saved: TrainConfig, config: TrainConfig) -> TrainConfig:
    """More steps of a run on generated tasks: they are taken from those that the run began with."""
    if config.steps == saved.steps or config.tasks.dir is not None:
        return config
    tasks = config.tasks.model_copy(update={"per_family": tasks_per_family(saved)})
    return config.model_copy(update={"tasks": tasks})


def _steps_done(run: Path) -> int:
    newest = checkpoints.latest(run)
    if newest is None:
        return 0
    try:
        return int(newest.name.rpartition("-")[2])
    except ValueError:
        raise RunError(f"{newest}: not a checkpoint's name") from None


def _is_free(key: str, free: Sequence[str]) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in free)


def _same_place(one: object, other: object) -> bool:
    paths = (one, other)
    return all(isinstance(path, Path) for path in paths) and len({os.path.abspath(str(p)) for p in paths}) == 1  # noqa: PTH100


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "(empty)"
    return "none" if value is None else str(value)
