"""What a run is made from beside its settings: the model and the tasks. A resumed run must find them unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from termrl.errors import RunError
from termrl.runs.files import write_atomically
from termrl.tasks.task import Task

_FILE = "inputs.json"
_DIGESTED = ("task.toml", "instruction.md", "tests", "environment")
_NAMED = 5


def check_inputs(run: Path, *, model: str, tasks: Mapping[str, Task]) -> None:
    """Record the inputs' digests in the run folder, or compare them with what stands there.

    Args:
        run: the run's folder.
        model: the model's sha256.
        tasks: by id.

    Raises:
        RunError: names what is not as the run began with it.
    """
    now: dict[str, Any] = {"model": model, "tasks": {name: task_digest(task.path) for name, task in tasks.items()}}
    path = run / _FILE
    if not path.exists():
        write_atomically(path, orjson.dumps(now, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        return
    then = orjson.loads(path.read_bytes())
    changed = ["the model"] if then["model"] != model else []
    known: dict[str, str] = then["tasks"]
    different = sorted(name for name, digest in known.items() if now["tasks"].get(name) != digest)
    different += sorted(set(now["tasks"]) - set(known))
    if different:
        more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
        changed.append(f"tasks {', '.join(different[:_NAMED])}{more}")
    if changed:
        raise RunError(
            f"{run}: {' and '.join(changed)} changed since the run began",
            hint="put back what was there, or start a new run in another folder",
        )


def task_digest(folder: Path) -> str:
    """sha256 over the names, contents and modes of what decides how a task folder behaves."""
    digest = hashlib.sha256()
    for name in _DIGESTED:
        top = folder / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_symlink():
                content = bytes(path.readlink())
            elif path.is_file():
                content = path.read_bytes()
            else:
                continue
            facts = f"{path.relative_to(folder)}\0{path.lstat().st_mode & 0o111:o}\0{len(content)}\0"
            digest.update(facts.encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()
