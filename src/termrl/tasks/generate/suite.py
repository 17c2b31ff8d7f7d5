"""Writing first-steps to disk: families × instances of one split, as complete Harbor folders."""

from __future__ import annotations

import difflib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from termrl.errors import TaskError
from termrl.tasks.generate.archives import gzip_bytes, tar_gz_bytes
from termrl.tasks.generate.checks import render_test
from termrl.tasks.generate.families import FAMILIES, LEVELS
from termrl.tasks.generate.family import Archive, Draw, Family, Folder, Gzip, Instance, Tree, expanded
from termrl.tasks.generate.words import Split, words_of

SUITE = "first-steps"

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "{suite}/{name}"
description = {description}

[metadata]
termrl_userland = "host"
suite = "{suite}"
family = "{family}"
level = {level}
split = "{split}"
look_first = {look_first}

[environment]
docker_image = "debian:12-slim"
workdir = "/app"
network_mode = "no-network"
memory_mb = 256
storage_mb = 64

[environment.env]
# `ls -l` prints no times, so that the same commands print the same in every run.
TIME_STYLE = "+"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0
"""


def generate(
    into: Path,
    *,
    split: Split = "train",
    families: Sequence[str] | None = None,
    levels: Sequence[int] | None = None,
    per_family: int = 8,
    seed: int = 0,
) -> list[Path]:
    """Write ``per_family`` tasks of each family into the new folder ``into``; the same arguments, the same bytes.

    Instances of a family differ from each other; the two splits share no word. More of a family with the same
    seed begins with the same ones.

    Args:
        into: a folder that is empty or not there yet; it appears at once, when all is written.
        split: whose words are used.
        families: names of :data:`FAMILIES`; all of ``levels`` when ``None``.
        levels: only families of these levels; when ``None``, any level of the named families, else level 1.
        per_family: how many of each, at least 1.
        seed: which instances.

    Returns:
        The task folders, family by family.

    Raises:
        TaskError: unknown family, level or split, a bad number, a folder that holds something already, or more
            instances than the words give.
    """
    chosen = choose_families(families, levels)
    if split not in ("train", "eval"):
        raise TaskError(f"split: {split!r} is not one of train, eval")
    if per_family < 1:
        raise TaskError(f"per_family: {per_family} is less than 1")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise TaskError(f"{into}: not an empty folder", hint="name a new one, or remove it first")
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.parent))
    except OSError as error:
        raise TaskError(f"{into}: cannot be written: {error.strerror}") from None
    try:
        names = []
        for family in chosen:
            for index, instance in enumerate(instances(family, split, per_family, seed)):
                names.append(f"{family.name}-{split}-{index:03d}")
                _write_task(staged / names[-1], family, split, instance)
        staged.chmod(0o755)
        staged.replace(into)
    except OSError as error:
        raise TaskError(f"{into}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return [into / name for name in names]


def instances(family: Family, split: Split, count: int, seed: int) -> Iterator[Instance]:
    """``count`` different instances of a family.

    Raises:
        TaskError: the words do not give as many.
    """
    words = words_of(split)
    seen: set[str] = set()
    attempt = 0
    while len(seen) < count:
        if attempt > 20 * count:
            raise TaskError(f"{family.name}: the vocabulary does not give {count} different tasks")
        instance = family.build(Draw(f"{seed}/{split}/{family.name}/{attempt}", words))
        attempt += 1
        key = repr((instance.instruction, sorted(expanded(instance.after))))
        if key not in seen:
            seen.add(key)
            yield instance


def choose_families(families: Sequence[str] | None = None, levels: Sequence[int] | None = None) -> list[Family]:
    """The families of these names (all when ``None``) that are of these levels.

    ``levels`` is a filter; when it is ``None`` named families may be of any level, and without names it is level 1.

    Raises:
        TaskError: an unknown name or level, or nothing is left.
    """
    unknown_levels = [level for level in levels or () if level not in LEVELS]
    if unknown_levels:
        there = ", ".join(map(str, LEVELS))
        raise TaskError(f"levels: there is no level {', '.join(map(str, unknown_levels))}", hint=f"there are: {there}")
    unknown = [name for name in families or () if name not in FAMILIES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(FAMILIES), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(FAMILIES)}"
        raise TaskError(f"families: no family named {', '.join(map(repr, unknown))}", hint=hint)
    if families is not None and not families:
        raise TaskError("families: none named")
    if levels is not None and not levels:
        raise TaskError("levels: none named")
    names = FAMILIES if families is None else dict.fromkeys(families)
    wanted = levels if levels is not None else (LEVELS if families is not None else LEVELS[:1])
    chosen = [FAMILIES[name] for name in names if FAMILIES[name].level in wanted]
    if not chosen:
        raise TaskError(f"levels: none of the named families is of level {', '.join(map(str, wanted))}")
    return chosen


def _write_task(folder: Path, family: Family, split: Split, instance: Instance) -> None:
    settings = _TASK_TOML.format(
        suite=SUITE,
        name=folder.name,
        description=json.dumps(instance.instruction),
        family=family.name,
        level=family.level,
        split=split,
        look_first=str(family.look_first).lower(),
    )
    solution = "".join(f"{line}\n" for line in ("#!/bin/bash", "set -e", *instance.solution))
    _write(folder / "task.toml", settings)
    _write(folder / "instruction.md", f"{instance.instruction}\n")
    _write(folder / "tests" / "test.sh", render_test(instance, extras=family.extras), mode=0o755)
    _write(folder / "solution" / "solve.sh", solution, mode=0o755)
    _write_tree(folder / "environment", instance.before)


def _write_tree(folder: Path, tree: Tree) -> None:
    for path, entry in tree.items():
        if isinstance(entry, Folder):
            raise ValueError(f"{path}: an empty folder at the start of a task would be lost in archives")
        if isinstance(entry, Gzip):
            _write(folder / path, gzip_bytes(f"{entry.text}\n".encode()))
        elif isinstance(entry, Archive):
            _write(folder / path, tar_gz_bytes(entry.texts))
        else:
            mode = entry.mode if entry.mode is not None else 0o755 if entry.runs else 0o644
            _write(folder / path, f"{entry.text}\n" if entry.text else "", mode=mode)


def _write(file: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    for parent in reversed(file.parents):
        if not parent.exists():
            parent.mkdir()
            parent.chmod(0o755)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    file.chmod(mode)
