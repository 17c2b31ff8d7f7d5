"""``.harborignore``: gitignore rules that keep files of ``tests/`` and ``solution/`` out of the sandbox."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from termrl.tasks.folder import read_text

IGNORE_FILE = ".harborignore"


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    keeps: bool
    folders_only: bool


def excluded_paths(folder: Path) -> frozenset[str]:
    """Paths below ``folder`` (a task's ``tests/`` or ``solution/``) that its ``.harborignore`` files leave out.

    Rules are gitignore's; those of a folder apply to everything below it, the deepest and last match wins, and
    nothing below an excluded folder comes back. The rule files themselves are always left out.

    Returns:
        Relative POSIX paths; everything below an excluded folder is listed too.

    Raises:
        TaskError: a rule file is not UTF-8 text.
    """
    out: set[str] = set()

    def visit(directory: Path, inherited: tuple[tuple[Path, list[_Rule]], ...], gone: bool) -> None:
        rules = inherited
        own = directory / IGNORE_FILE
        if not gone and own.is_file():
            rules = (*inherited, (directory, _parse(read_text(own))))
        for path in directory.iterdir():
            is_folder = path.is_dir()
            ignored = gone or path.name == IGNORE_FILE or _matches(path, is_folder, rules)
            if ignored:
                out.add(path.relative_to(folder).as_posix())
            if is_folder and not path.is_symlink():
                visit(path, rules, ignored)

    if folder.is_dir():
        visit(folder, (), False)
    return frozenset(out)


def _matches(path: Path, is_folder: bool, rules: tuple[tuple[Path, list[_Rule]], ...]) -> bool:
    excluded = False
    for base, own in rules:
        name = path.relative_to(base).as_posix()
        for rule in own:
            if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(name):
                excluded = not rule.keeps
    return excluded


def _parse(text: str) -> list[_Rule]:
    rules = []
    for raw in text.split("\n"):
        line = re.sub(r"(?<!\\) +$", "", raw)
        if not line or line.startswith("#"):
            continue
        keeps = line.startswith("!")
        line = line[1:] if keeps else line
        folders_only = line.endswith("/")
        line = line.rstrip("/")
        if line:
            rules.append(_Rule(re.compile(_regex(line)), keeps, folders_only))
    return rules


def _regex(pattern: str) -> str:
    """The regular expression of one gitignore pattern over a relative path without a trailing slash."""
    # A slash in front or in the middle ties the pattern to the rule file's folder; else it holds at any depth.
    prefix = "" if "/" in pattern else "(?:.*/)?"
    pattern = pattern.removeprefix("/")
    out, i = prefix, 0
    while i < len(pattern):
        rest = pattern[i:]
        if rest.startswith("**/") and (i == 0 or pattern[i - 1] == "/"):
            out, i = out + "(?:.*/)?", i + 3
        elif rest == "**" and i > 0 and pattern[i - 1] == "/":
            out, i = out + ".+", i + 2
        elif rest[0] == "*":
            out, i = out + "[^/]*", i + 1
        elif rest[0] == "?":
            out, i = out + "[^/]", i + 1
        elif rest[0] == "[" and (end := pattern.find("]", i + 2)) > 0:
            body = pattern[i + 1 : end].replace("\\", "\\\\")
            out, i = out + "(?!/)[" + ("^" + body[1:] if body[0] in "!^" else body) + "]", end + 1
        elif rest[0] == "\\" and len(rest) > 1:
            out, i = out + re.escape(rest[1]), i + 2
        else:
            out, i = out + re.escape(rest[0]), i + 1
    return out
