"""Checkpoints of a run: each appears whole or not at all, and holds all that a resumed run needs.

``checkpoints/step-000012/`` holds ``adapter/`` (peft's format; ``model/`` in transformers' where all weights are
trained), ``trainer.safetensors`` (what is trained and AdamW's moments) and ``checkpoint.json`` (step, score and what
the loop wants back). The last few and the best one are kept.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from termrl.errors import RunError
from termrl.runs.files import write_atomically
from termrl.training.adapter import export_merged

if TYPE_CHECKING:
    from termrl.training.trainer import Trainer

__all__ = [
    "Checkpoint",
    "annotate",
    "at_step",
    "atomic_folder",
    "best",
    "export_merged",
    "latest",
    "load",
    "save",
    "steps",
]

_FOLDER = "checkpoints"
_RECORD = "checkpoint.json"
_STATE = "trainer.safetensors"
_NAME = re.compile(r"step-(\d{6,})")
_TEMPORARY = ".partial-"
# From <fcntl.h> and <linux/fs.h>.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        path: its folder.
        step: training steps done when it was written.
        score: what the best one is chosen by (higher is better), or ``None``.
        loop: what the loop stored with it.
        trainer: the state for :meth:`termrl.training.trainer.Trainer.load_state_dict`.
    """

    path: Path
    step: int
    score: float | None
    loop: dict[str, Any]
    trainer: dict[str, Any]

    @property
    def adapter(self) -> Path:
        """The low-rank update, a folder in peft's format; absent after a full fine-tune."""
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """The whole model, a folder in transformers' format; present after a full fine-tune only."""
        return self.path / "model"


def save(
    run: Path,
    trainer: Trainer,
    *,
    step: int,
    score: float | None = None,
    loop: Mapping[str, Any] | None = None,
    keep_last: int = 2,
) -> Path:
    """Write the checkpoint of a step, then remove those that are neither among the last ``keep_last`` nor the best.

    Args:
        run: the run's folder.
        trainer: what to save.
        step: training steps done.
        score: higher is better; ``None`` if it was not evaluated.
        loop: JSON values that the loop needs to go on.
        keep_last: how many of the newest to keep, at least 1.

    Returns:
        The checkpoint's folder. A checkpoint of the same step is replaced.
    """
    from safetensors.torch import save_file

    if keep_last < 1:
        raise ValueError("keep_last must be at least 1")
    state = trainer.state_dict()
    path = run / _FOLDER / f"step-{step:06d}"
    record = {"step": step, "score": score, "trainer_step": state["step"], "loop": dict(loop or {})}
    with atomic_folder(path) as folder:
        if trainer.config.full:
            trainer.save_model(folder / "model")
        else:
            trainer.save_adapter(folder / "adapter")
        save_file(state["tensors"], folder / _STATE)
        (folder / _RECORD).write_bytes(_text(record))
    _prune(run, keep_last)
    return path


def annotate(run: Path, step: int, *, score: float | None = None, loop: Mapping[str, Any] | None = None) -> None:
    """Renew what a step's checkpoint says beside its tensors, in one rename; ``None`` leaves what is there.

    Raises:
        RunError: there is no such checkpoint.
    """
    path = run / _FOLDER / f"step-{step:06d}"
    record = _record(path)
    if score is not None:
        record["score"] = score
    if loop is not None:
        record["loop"] = dict(loop)
    write_atomically(path / _RECORD, _text(record))


def latest(run: Path) -> Path | None:
    """The newest checkpoint's folder, or ``None``."""
    found = _all(run)
    return found[-1][1] if found else None


def best(run: Path) -> Path | None:
    """The folder of the checkpoint with the highest score (the earliest of several), or ``None`` if none has one."""
    top: tuple[float, Path] | None = None
    for _, path in _all(run):
        score = _record(path)["score"]
        if score is not None and (top is None or score > top[0]):
            top = (score, path)
    return None if top is None else top[1]


def steps(run: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    return [step for step, _ in _all(run)]


def at_step(run: Path, step: int) -> Path | None:
    """The folder of the checkpoint after ``step``, or ``None``."""
    return dict(_all(run)).get(step)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        RunError: it is not one, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    record = _record(path)
    try:
        tensors = load_file(path / _STATE)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path / _STATE}: cannot be read: {error}", hint="resume from an older checkpoint") from error
    trainer = {"step": record["trainer_step"], "tensors": tensors}
    return Checkpoint(path, record["step"], record["score"], record["loop"], trainer)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``path`` when the block ends, flushed to disk, and vanishes if it raises.

    An older ``path`` is replaced. What a killed process left half-written of it is removed by the next call, so
    only one process may write ``path`` at a time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f"{_TEMPORARY}{path.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = path.parent / f"{_TEMPORARY}{path.name}-{uuid4().hex}"
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                _flush(Path(folder, name))
            _flush(Path(folder))
        if path.exists():
            _exchange(temporary, path)
            _flush(path.parent)
            shutil.rmtree(temporary)
        else:
            temporary.rename(path)
            _flush(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _exchange(left: Path, right: Path) -> None:
    """Swap two paths in one step: a kill at any moment finds one of the two in each place."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(right))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _all(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each checkpoint, oldest first."""
    folder = run / _FOLDER
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def _text(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / _RECORD).read_text())
        if not isinstance(record["loop"], dict) or {"step", "score", "trainer_step"} - set(record):
            raise ValueError("keys are missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path / _RECORD}: cannot be read: {error}", hint="give a checkpoint's folder") from error
    if record["score"] is not None and not math.isfinite(record["score"]):
        raise RunError(f"{path / _RECORD}: the score is not a number")
    return record


def _prune(run: Path, keep_last: int) -> None:
    for leftover in (run / _FOLDER).glob(f"{_TEMPORARY}step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in (run / _FOLDER).glob(f"*/.{_RECORD}.*"):
        leftover.unlink(missing_ok=True)
    kept = {path for _, path in _all(run)[-keep_last:]}
    top = best(run)
    for _, path in _all(run):
        if path not in kept and path != top:
            # Renamed first: a kill in mid-removal must not leave a checkpoint that is missing files.
            doomed = path.with_name(f"{_TEMPORARY}{path.name}-{uuid4().hex}")
            path.rename(doomed)
            shutil.rmtree(doomed)
