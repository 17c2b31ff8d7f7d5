"""What a run is made from beside its settings: the model and the tasks. A resumed run must find them unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from termrl.errors import RunError
from termrl.runs.files import write_atomically
from termrl.tasks.task import Task

_FILE = "inputs.json"
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
    now: dict[str, Any] = {"model": model, "tasks": {name: task.digest for name, task in tasks.items()}}
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
