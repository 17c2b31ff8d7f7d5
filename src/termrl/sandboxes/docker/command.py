"""The docker command line, which is how BuildKit is reached."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Up to this version BuildKit is part of the command line, from it on it is the plugin buildx.
_PLUGIN_SINCE = 23
_BUILDKIT_SINCE = 19
_PROBE_S = 20.0
_USUAL_FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/homebrew/bin", "/snap/bin")
# What could lead the command line to another daemon, builder or platform than the sandboxes have.
_MISLEADING = ("DOCKER_CONTEXT", "BUILDX_BUILDER", "BUILDKIT_HOST", "DOCKER_DEFAULT_PLATFORM")


@dataclass(frozen=True)
class CommandLine:
    """A docker program that builds with BuildKit, or why none of those found can."""

    program: Path | None
    why_not: str = ""


def find_command_line(environ: Mapping[str, str]) -> CommandLine:
    """The first docker program on ``PATH`` or in the usual folders that can build with BuildKit."""
    folders = [*environ.get("PATH", "").split(os.pathsep), *_USUAL_FOLDERS]
    seen: dict[Path, str] = {}
    for folder in folders:
        found = shutil.which("docker", path=folder) if folder else None
        program = Path(found).resolve() if found else None
        if program is None or program in seen:
            continue
        seen[program] = _lacks(program, environ)
        if not seen[program]:
            return CommandLine(program)
    if not seen:
        return CommandLine(None, "there is no docker program on PATH")
    return CommandLine(None, "; ".join(f"{program} {why}" for program, why in seen.items()))


def command_environment(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the docker program talks to the daemon at ``address`` and uses BuildKit."""
    env = {name: value for name, value in environ.items() if name not in _MISLEADING}
    return {**env, "DOCKER_HOST": address, "DOCKER_BUILDKIT": "1", "NO_COLOR": "1"}


def _lacks(program: Path, environ: Mapping[str, str]) -> str:
    """Why ``program`` cannot build with BuildKit, or an empty text."""
    said = _run([str(program), "--version"], environ)
    match = re.search(r"Docker version (\d+)\.", said or "")
    if match is None:
        return "is not Docker's"
    major = int(match[1])
    if major < _BUILDKIT_SINCE:
        return f"is too old ({major})"
    if major >= _PLUGIN_SINCE and _run([str(program), "buildx", "version"], environ) is None:
        return "lacks its plugin buildx"
    return ""


def _run(argv: list[str], environ: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PROBE_S, env=dict(environ), check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
