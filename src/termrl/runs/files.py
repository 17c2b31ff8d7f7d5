"""Files that are whole or absent, and logs whose last line may be torn but never the ones before it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: a reader, also after a crash, sees the old content or the new, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)  # noqa: PTH105 - both sides are plain paths
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data``, whole or not at all.

    Raises:
        FileExistsError: something is there already, also when another process came first by an instant.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        os.link(temporary, path)  # unlike rename, link refuses to replace
    finally:
        Path(temporary).unlink(missing_ok=True)
    sync_folder(path.parent)


def append_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append one line per record in one write, on disk when this returns."""
    data = b"".join(orjson.dumps(r, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY) for r in records)
    new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        sync_folder(path.parent)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; a torn last line (a writer killed in mid-write) is not there."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield orjson.loads(line)


def cut(path: Path, size: int) -> None:
    """Cut a log to its first ``size`` bytes, on disk when this returns. A log that is not there has none.

    Raises:
        ValueError: the log is shorter than that.
    """
    length = path.stat().st_size if path.exists() else 0
    if length < size:
        raise ValueError(f"{path}: has {length} bytes where {size} were written")
    if length == size:
        return
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
