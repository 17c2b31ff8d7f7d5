"""What checks before a launch find, and what they tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from termrl.integrations.miles.launch import node
from termrl.integrations.miles.launch.command import Plan
from termrl.integrations.miles.launch.profile import Profile

_NAMED = 5


@dataclass(frozen=True)
class Problem:
    """One finding. ``check`` is the name that ``--skip-preflight`` takes; a warning does not stop the launch."""

    check: str
    message: str
    hint: str = ""
    warning: bool = False


@dataclass
class Known:
    """What the checks share.

    Attributes:
        rows: task ids of the prompt file, as far as they could be read.
        verifier_s: verifier's budget of each task that an environment or a folder told of.
        served: tasks that can be had; ``None`` where that is not known.
    """

    profile: Profile
    plan: Plan
    run: Path
    environ: Mapping[str, str]
    facts: node.Facts | None = None
    rows: list[str] = field(default_factory=list)
    verifier_s: dict[str, float] = field(default_factory=dict)
    served: frozenset[str] | None = None


def names(tasks: Sequence[str]) -> str:
    """The first of them, and how many more."""
    more = f" and {len(tasks) - _NAMED} more" if len(tasks) > _NAMED else ""
    return ", ".join(tasks[:_NAMED]) + more
