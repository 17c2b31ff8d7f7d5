"""Reading a Dockerfile just far enough: its instructions, its last WORKDIR, and COPY sources that are missing."""

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


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word in capitals, its arguments, and the lines ``[start, end)`` that hold them.

    ``heredoc`` says that the lines from ``end`` on are the body of a heredoc.
    """

    word: str
    rest: str
    start: int
    end: int
    heredoc: bool = False


def read_dockerfile(text: str, folder: Path) -> Dockerfile:
    """Read a Dockerfile's text; ``folder`` is its build context. Never raises on what it does not understand."""
    workdir: str | None = None
    stages: dict[str, str | None] = {}
    stage = ""
    variables: dict[str, str] = {}
    missing: list[str] = []
    for instruction in instructions(text):
        word, rest = instruction.word, instruction.rest
        if word == "FROM":
            parts = [part for part in rest.split() if not part.startswith("--")]
            stages[stage] = workdir
            stage = parts[2].lower() if len(parts) == 3 and parts[1].upper() == "AS" else ""
            workdir = stages.get(parts[0].lower()) if parts else None
        elif word in ("ENV", "ARG"):
            variables.update(assigned(rest, variables))
        elif word == "WORKDIR":
            target = fill_variables(rest.strip().strip("\"'"), variables)
            workdir = None if "$" in target else posixpath.normpath(posixpath.join(workdir or "/", target))
        elif word in ("COPY", "ADD"):
            missing += [source for source in _sources(rest) if not _present(source, folder)]
    return Dockerfile(workdir, tuple(missing))


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions with continuations joined, comments dropped and heredoc bodies skipped."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        start, line = at, lines[at]
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line.strip()
        while whole.endswith("\\") and at < len(lines):
            following = lines[at].strip()
            whole = whole if following.startswith("#") else f"{whole[:-1]} {following}"
            at += 1
        word, _, rest = whole.partition(" ")
        end, heredoc = at, False
        if word.upper() in ("RUN", "COPY", "ADD"):
            for dash, _, mark in _HEREDOC.findall(rest):
                heredoc = True
                while at < len(lines):
                    at += 1
                    if (lines[at - 1].lstrip("\t") if dash else lines[at - 1]) == mark:
                        break
        yield Instruction(word.upper(), rest.strip(), start, end, heredoc)


def assigned(rest: str, variables: dict[str, str]) -> dict[str, str]:
    """What the arguments of an ENV or ARG set, given what is set before."""
    name, _, value = rest.partition(" ")
    pairs = _ASSIGNMENT.findall(rest) or [(name, value)]
    return {name: fill_variables(value.strip("\"'"), variables) for name, value in pairs}


def fill_variables(value: str, variables: dict[str, str]) -> str:
    """``$NAME``, ``${NAME}`` and ``${NAME:-default}`` filled in; what is not known stays as it stands."""

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
