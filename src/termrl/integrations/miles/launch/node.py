"""Run where training will run: looks at that machine and prints what it found as one line of JSON.

It judges nothing and imports neither miles nor torch: miles' files are looked at, which takes a fraction of a second.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MARK = "termrl-node-facts: "

_FLAG_FILES = ("utils/arguments.py", "rollout/generate_hub/agentic_tool_call.py")
_SURFACE = (
    "rollout/generate_hub/agentic_tool_call.py",
    "rollout/filter_hub/dynamic_sampling_filters.py",
    "utils/chat_template_utils/tito_tokenizer.py",
    "utils/arguments.py",
)
_TITO_CLASS = "TITOTokenizerType"


@dataclass
class Wanted:
    """What is asked. ``gpus`` of a Ray cluster are waited for, ``wait_s`` seconds."""

    flags: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    disks: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    ray: bool = False
    gpus: int = 0
    wait_s: float = 0.0


@dataclass
class Facts:
    """What was found.

    Attributes:
        miles: folder of the package, ``None`` if it cannot be imported; ``miles_version`` of what is installed.
        missing: files of miles that it is driven by and that are not there; ``unknown_flags`` likewise.
        unreadable: of ``Wanted.files``; ``disk_gb``: free space by path; ``unset``: variables without a value.
        gpus: of the machine, or of the Ray cluster.
    """

    miles: str | None = None
    miles_version: str | None = None
    missing: list[str] = field(default_factory=list)
    unknown_flags: list[str] = field(default_factory=list)
    tito: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    no_programs: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    disk_gb: dict[str, float] = field(default_factory=dict)
    open_files: int = 0
    gpus: int = 0


def look(wanted: Wanted) -> Facts:
    """Look at this machine."""
    facts = Facts(
        unreadable=[name for name in wanted.files if not _readable(Path(name))],
        no_programs=[name for name in wanted.programs if shutil.which(name) is None],
        unset=[name for name in wanted.variables if not os.environ.get(name)],
        disk_gb={name: _free_gb(Path(name)) for name in wanted.disks},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        gpus=_ray_gpus(wanted) if wanted.ray else len(list(Path("/dev").glob("nvidia[0-9]*"))),
    )
    _look_at_miles(facts, wanted)
    return facts


def _look_at_miles(facts: Facts, wanted: Wanted) -> None:
    found = importlib.util.find_spec("miles")
    if found is None or not found.submodule_search_locations:
        return
    folder = Path(next(iter(found.submodule_search_locations)))
    facts.miles = str(folder)
    try:
        facts.miles_version = importlib.metadata.version("miles")
    except importlib.metadata.PackageNotFoundError:
        facts.miles_version = None
    facts.missing = [name for name in _SURFACE if not (folder / name).is_file()]
    text = "\n".join(_text(folder / name) for name in _FLAG_FILES)
    facts.unknown_flags = [flag for flag in wanted.flags if f'"{flag}"' not in text and f"'{flag}'" not in text]
    facts.tito = _tito(_text(folder / "utils/chat_template_utils/tito_tokenizer.py"))


def _tito(source: str) -> list[str]:
    """The values of the enumeration, from its source."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == _TITO_CLASS]
    return [
        str(line.value.value)
        for body in bodies
        for line in body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
    ]


def _ray_gpus(wanted: Wanted) -> int:
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    give_up = time.monotonic() + wanted.wait_s
    while True:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus >= wanted.gpus or time.monotonic() >= give_up:
            return gpus
        time.sleep(2.0)


def _readable(path: Path) -> bool:
    try:
        if path.is_dir():
            return os.access(path, os.R_OK | os.X_OK)
        with path.open("rb") as stream:
            return bool(stream.read(1))
    except OSError:
        return False


def _free_gb(path: Path) -> float:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free / 1e9


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def found_in(output: str) -> Facts | None:
    """The facts in what a run of this module printed; ``None`` where there are none."""
    lines = re.findall(rf"^{MARK}(.*)$", output, re.MULTILINE)
    return Facts(**json.loads(lines[-1])) if lines else None


def arguments(wanted: Wanted) -> list[str]:
    """The words that run this module for ``wanted``, after the name of a Python."""
    return ["-m", __spec__.name if __spec__ is not None else __name__, json.dumps(asdict(wanted))]


def main(argv: Sequence[str]) -> None:
    """Print the facts that the JSON in ``argv`` asks for."""
    asked: dict[str, Any] = json.loads(argv[0])
    print(f"{MARK}{json.dumps(asdict(look(Wanted(**asked))))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
