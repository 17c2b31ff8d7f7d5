"""Filling ``${VAR}`` in a task's variables from the host, when they are used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from termrl.errors import TaskError

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def resolve_env(env: Mapping[str, str], where: str) -> dict[str, str]:
    """Fill values that are, as a whole, ``${VAR}`` or ``${VAR:-default}``; embedded ones stay literal.

    Args:
        env: variables as task.toml has them.
        where: file and table they come from, such as ``x/task.toml: verifier.env``, for the message.

    Raises:
        TaskError: variables without a default are not set on the host (all of them at once).
    """
    resolved: dict[str, str] = {}
    problems: list[str] = []
    missing: list[str] = []
    for key, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        if match is None:
            resolved[key] = value
            continue
        filled = os.environ.get(match[1], match[2])
        if filled is None:
            problems.append(f"{where}.{key}: the host variable {match[1]} is not set")
            missing.append(match[1])
        else:
            resolved[key] = filled
    if problems:
        names = " ".join(dict.fromkeys(missing))
        raise TaskError("\n".join(problems), hint=f"set it before the start, for example: export {names.split()[0]}=…")
    return resolved


def filled_from_host(env: Mapping[str, str]) -> dict[str, str]:
    """The host's variables that ``env`` takes values from, as they are now; defaults of the task are not among them."""
    names = {match[1] for value in env.values() if (match := _TEMPLATE.fullmatch(value))}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}
