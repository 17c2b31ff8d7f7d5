"""What is measured: an endpoint's model, a model in this process, or a checkpoint of a run."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from termrl.agent.policy import redacted
from termrl.config import BUNDLED_MODEL, SamplingConfig, TrainConfig
from termrl.engine.bundled import ensure_model
from termrl.engine.folder import model_sha256
from termrl.errors import PolicyError, RunError
from termrl.evaluation.config import ENDPOINT_PRESETS, EvalConfig, PolicyConfig
from termrl.evaluation.endpoint import open_endpoint
from termrl.rollout.scheduler import PolicySessions
from termrl.settings import load_settings
from termrl.training import checkpoints

_NEWEST, _BEST = "latest", "best"


@dataclass(frozen=True)
class LocalModel:
    """A model that runs in this process.

    Attributes:
        folder: in transformers' form.
        adapter: folder of an update to its weights, in peft's form.
        checkpoint: where they are from, if from a run.
    """

    folder: Path
    adapter: Path | None = None
    checkpoint: Path | None = None

    @property
    def digest(self) -> str:
        """Of the weights, the adapter's included."""
        base = model_sha256(self.folder)
        if self.adapter is None:
            return base
        from termrl.training.adapter import WEIGHTS

        update = hashlib.sha256((self.adapter / WEIGHTS).read_bytes()).hexdigest()
        return hashlib.sha256(f"{base}+{update}".encode()).hexdigest()


def find_model(name: str | None) -> LocalModel:
    """The model called ``name``, see ``policy.model``.

    Raises:
        ModelError, RunError: there is none.
    """
    run, which = _split(name or BUNDLED_MODEL)
    if run is None:
        return LocalModel(ensure_model(name or BUNDLED_MODEL))
    checkpoint = _checkpoint(run, which)
    if (checkpoint / "model").is_dir():  # all weights were trained
        return LocalModel(checkpoint / "model", None, checkpoint)
    return LocalModel(ensure_model(_settings(run).model.path), checkpoint / "adapter", checkpoint)


def presets(policy: PolicyConfig) -> dict[str, Mapping[str, Any]]:
    """What stands for other defaults with this policy, by where it comes from, for ``load_settings``.

    A run's checkpoint is measured as the run itself evaluates: with its episode, verifier and sampling settings.

    Raises:
        ConfigError: the run's settings cannot be read.
    """
    if policy.base_url is not None:
        return {"defaults for endpoints": ENDPOINT_PRESETS}
    run, _ = _split(policy.model or BUNDLED_MODEL)
    if run is None:
        return {"defaults for models here": {"sampling": {"temperature": SamplingConfig().temperature}}}
    settings = _settings(run)
    sections = {name: getattr(settings, name).model_dump(exclude_none=True) for name in ("episode", "verify")}
    given = settings.evaluation.temperature
    temperature = settings.sampling.temperature if given is None else given
    return {str(run / "config.toml"): {**sections, "sampling": {"temperature": temperature}}}


def identity(policy: PolicyConfig, model: LocalModel | None) -> dict[str, Any]:
    """What was measured, for the records: no secret is in it."""
    if model is None:
        return {"base_url": redacted(policy.base_url or ""), "model": policy.model}
    checkpoint = None if model.checkpoint is None else str(model.checkpoint)
    return {"model": policy.model or BUNDLED_MODEL, "checkpoint": checkpoint, "sha256": model.digest}


@asynccontextmanager
async def open_policy(
    config: EvalConfig,
    model: LocalModel | None,
    key: str | None,
    *,
    fatal: Callable[[PolicyError], None],
    say: Callable[[str], None],
) -> AsyncIterator[PolicySessions]:
    """Where the episodes' policies come from: ``model`` in this process, or the endpoint where there is none.

    Args:
        fatal: told why no further episode can succeed.
        say: told what a user should know.

    Raises:
        ModelError: the model cannot be loaded.
    """
    if model is None:
        async with open_endpoint(config, key, fatal=fatal, say=say) as sessions:
            yield sessions
        return
    from termrl.engine.transformers import EmbeddedEngine
    from termrl.rollout.served import serve_engine

    engine = EmbeddedEngine(model.folder, threads=config.policy.threads)
    if model.adapter is not None:
        from termrl.training.adapter import merged_weights

        engine.set_weights(merged_weights(model.folder, model.adapter), 0)
    stop_at_fence = config.episode.stop_at_fence
    async with serve_engine(engine, model.folder, schedule="continuous", stop_at_fence=stop_at_fence) as served:
        yield served.sessions


def _split(name: str) -> tuple[Path | None, str]:
    """The run's folder and which of its checkpoints, where ``name`` is of that kind."""
    whole = Path(name).expanduser()
    if _is_run(whole):
        return whole, _NEWEST
    head, at, which = name.rpartition("@")
    folder = Path(head).expanduser()
    return (folder, which) if at and _is_run(folder) else (None, "")


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir()


def _settings(run: Path) -> TrainConfig:
    return load_settings(TrainConfig, files=[run / "config.toml"]).config


def _checkpoint(run: Path, which: str) -> Path:
    if which == _NEWEST:
        found = checkpoints.latest(run)
    elif which == _BEST:
        found = checkpoints.best(run)
    else:
        found = checkpoints.at_step(run, int(which)) if which.isdecimal() else None
    if found is None:
        steps = ", ".join(map(str, checkpoints.steps(run)))
        raise RunError(
            f"{run}: has no checkpoint {which}",
            hint=f"there are those of steps {steps}; RUN@best is the best scored one" if steps else "it has none yet",
        )
    return found
