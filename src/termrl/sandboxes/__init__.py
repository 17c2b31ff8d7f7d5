"""Sandboxes: one machine for one episode.

``base`` holds the nouns, ``bubblewrap`` the backend for this machine, ``output`` bounded capture, ``sweep`` the
removal of what a killed process left behind. :func:`open_provider` makes a provider by the name that ``--sandbox``
takes.
"""

from __future__ import annotations

from typing import Any

from termrl.errors import ConfigError
from termrl.sandboxes.base import ExecResult, Sandbox, SandboxProvider, SandboxSpec

_PLANNED = {"docker": "the docker backend is not part of this version"}

__all__ = ["ExecResult", "Sandbox", "SandboxProvider", "SandboxSpec", "open_provider"]


def open_provider(name: str, **settings: Any) -> SandboxProvider:
    """Make the provider ``name`` with its own settings (see its class).

    Raises:
        ConfigError: there is no such backend, or it has no such setting.
        SandboxStartError: this machine lacks what it needs.
    """
    if name in _PLANNED:
        raise ConfigError(f"sandbox: {name}: {_PLANNED[name]}", hint='use sandbox = "bubblewrap"')
    if name != "bubblewrap":
        raise ConfigError(f"sandbox: {name}: there is no such backend", hint='use sandbox = "bubblewrap"')
    from termrl.sandboxes.bubblewrap import BubblewrapProvider

    try:
        return BubblewrapProvider(**settings)
    except TypeError as error:
        raise ConfigError(f"sandbox: bubblewrap: {error}") from error
