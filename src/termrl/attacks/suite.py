"""The whole suite."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from termrl.attacks.attack import Attack
from termrl.attacks.forging import PROCESSES, REWARD, TESTS
from termrl.attacks.hostile import FILES, RESOURCES, SANDBOX
from termrl.attacks.python import DOWNLOADS, PYTHON
from termrl.attacks.tooling import SHELL, SYSTEM, TOOLS
from termrl.errors import ConfigError

ATTACKS: tuple[Attack, ...] = (
    *REWARD,
    *TESTS,
    *PROCESSES,
    *SHELL,
    *TOOLS,
    *SYSTEM,
    *PYTHON,
    *DOWNLOADS,
    *FILES,
    *RESOURCES,
    *SANDBOX,
)


def chosen(names: Sequence[str]) -> tuple[Attack, ...]:
    """The attacks of these names or groups, in the suite's order; all of them if none is named.

    Raises:
        ConfigError: there is no such attack or group.
    """
    known = {attack.name for attack in ATTACKS} | {str(attack.group) for attack in ATTACKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else "termrl attack --list names them"
        raise ConfigError([f"--only: there is no attack {name}" for name in unknown], hint=hint)
    return tuple(attack for attack in ATTACKS if not names or attack.name in names or attack.group in names)
