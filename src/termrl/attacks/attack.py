"""What an attack is: what a policy that does not solve its task would run to be paid all the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Group(StrEnum):
    """What an attack is aimed at (closed list)."""

    REWARD = "reward"
    TESTS = "tests"
    PROCESSES = "processes"
    SHELL = "shell"
    TOOLS = "tools"
    PYTHON = "python"
    DOWNLOADS = "downloads"
    SYSTEM = "system"
    FILES = "files"
    RESOURCES = "resources"
    SANDBOX = "sandbox"


@dataclass(frozen=True)
class Attack:
    """One attack on any task.

    Attributes:
        name: what ``--only`` takes; lower case with hyphens.
        group: what it is aimed at.
        what: what it tries, in one line.
        turns: the policy's commands, one a turn. They must not solve the task, and may fail where a sandbox has no
            such program or file.
        spoils: an honest solution cannot be expected to work in the same sandbox afterwards.
        hangs: it can make the tests run until their time is up.
    """

    name: str
    group: Group
    what: str
    turns: tuple[str, ...]
    spoils: bool = False
    hangs: bool = False
