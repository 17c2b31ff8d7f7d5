"""Reading a Dockerfile just far enough: its last WORKDIR, and the files that it copies in but that are not there."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEREDOC = re.compile(r"<<(-?)([\"']?)([A-Za-z_][A-Za-z0-9_]*)\2")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*))")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)")


@dataclass(frozen=True)
class Dockerfile:
    """What was read.

    Attributes:
        workdir: the last stage's WORKDIR, ``None`` if it has none or one that only a build can tell.
        missing: sources of COPY and ADD that the build folder does not hold.
    """

    workdir: str | None
    missing: tuple[str, ...]


def read_dockerfile(text: str, folder: Path) -> Dockerfile:
    """Read a Dockerfile's text; ``folder`` is its build context. Never raises on what it does not understand."""
    workdir: str | None = None
    stages: dict[str, str | None] = {}
    stage = ""
    variables: dict[str, str] = {}
    missing: list[str] = []
    for word, rest in _instructions(text):
        if word == "FROM":
            parts = [part for part in rest.split() if not part.startswith("--")]
            stages[stage] = workdir
            stage = parts[2].lower() if len(parts) == 3 and parts[1].upper() == "AS" else ""
            workdir = stages.get(parts[0].lower()) if parts else None
        elif word in ("ENV", "ARG"):
            name, _, value = rest.partition(" ")
            assigned = _ASSIGNMENT.findall(rest) or [(name, value)]
            variables.update({name: _fill(value.strip("\"'"), variables) for name, value in assigned})
        elif word == "WORKDIR":
            target = _fill(rest.strip().strip("\"'"), variables)
            workdir = None if "$" in target else posixpath.normpath(posixpath.join(workdir or "/", target))
        elif word in ("COPY", "ADD"):
            missing += [source for source in _sources(rest) if not _present(source, folder)]
    return Dockerfile(workdir, tuple(missing))


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """(instruction, arguments) with continuations joined, comments dropped and heredoc bodies skipped."""
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line.strip()
        while whole.endswith("\\"):
            following = next(lines, "").strip()
            whole = whole if following.startswith("#") else f"{whole[:-1]} {following}"
        word, _, rest = whole.partition(" ")
        if word.upper() in ("RUN", "COPY", "ADD"):
            for dash, _, end in _HEREDOC.findall(rest):
                for body in lines:
                    if (body.lstrip("\t") if dash else body) == end:
                        break
        yield word.upper(), rest.strip()


def _fill(value: str, variables: dict[str, str]) -> str:
    def known(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or match[0])

    return _VARIABLE.sub(known, value)


def _sources(rest: str) -> list[str]:
    flags = []
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        flags.append(flag)
        rest = rest.lstrip()
    if any(flag.startswith("--from") for flag in flags):
        return []
    try:
        parts = json.loads(rest) if rest.startswith("[") else rest.split()
    except ValueError:
        return []
    return [part for part in parts[:-1] if isinstance(part, str) and not part.startswith("<<")]


def _present(source: str, folder: Path) -> bool:
    if "$" in source or "://" in source or source.startswith("git@"):
        return True
    relative = source.strip("\"'").lstrip("/")
    if re.search(r"[*?\[]", relative):
        return any(True for _ in folder.glob(relative))
    return (folder / relative).exists()
