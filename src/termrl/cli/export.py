"""``termrl export``: a run's trained weights as a folder that other programs load."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from termrl.errors import RunError


def export(
    run: Path,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    merged: Annotated[bool, Parameter(negative="")] = False,
    which: Literal["latest", "best"] = "latest",
) -> int:
    """Write a run's model as a stand-alone folder or adapter.

    Parameters
    ----------
    run
        The run's folder.
    out
        A folder that does not exist yet.
    merged
        Write whole weights (safetensors, tokenizer and config; transformers loads it) instead of the LoRA adapter
        in peft's format, which belongs to exactly the base model of the run. After a full fine-tune, always so.
    which
        The newest checkpoint, or the one with the highest score: its evaluation's pass rate; where none is made
        during training, the mean reward of the rollouts that its weights sampled.
    """
    from termrl.config import TrainConfig
    from termrl.engine.bundled import ensure_model
    from termrl.settings import load_settings
    from termrl.training import checkpoints

    if not (run / "config.toml").is_file():
        raise RunError(f"{run}: no run there (config.toml is missing)")
    if out.exists():
        raise RunError(f"{out}: is there already", hint="give another --out")
    checkpoint = checkpoints.best(run) if which == "best" else checkpoints.latest(run)
    if checkpoint is None:
        raise RunError(f"{run}: has no checkpoint yet", hint="a run has one after its first step")
    adapter, whole = checkpoint / "adapter", (checkpoint / "model").is_dir()
    if whole:  # all weights were trained: there is no adapter, and nothing to merge
        with checkpoints.atomic_folder(out) as folder:
            shutil.copytree(checkpoint / "model", folder, dirs_exist_ok=True)
    elif merged:
        config = load_settings(TrainConfig, files=[run / "config.toml"]).config
        checkpoints.export_merged(ensure_model(config.model.path), adapter, out)
    else:
        with checkpoints.atomic_folder(out) as folder:
            shutil.copytree(adapter, folder, dirs_exist_ok=True)
    print(f"{out}: {'model' if merged or whole else 'adapter'} of {checkpoint.name}", file=sys.stdout)
    return 0
