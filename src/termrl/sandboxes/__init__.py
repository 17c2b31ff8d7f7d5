"""Sandboxes: one machine for one episode.

``base`` holds the nouns, ``bubblewrap`` the backend for this machine, ``docker`` that for containers, ``output``
bounded capture, ``sweep`` the removal of what a killed process left behind. :func:`open_provider` makes a provider by
the name that ``--sandbox`` takes.
"""

from __future__ import annotations

from typing import Any

from termrl.errors import ConfigError
from termrl.sandboxes.base import ExecResult, Sandbox, SandboxProvider, SandboxSpec

BACKENDS = ("bubblewrap", "docker")

__all__ = ["BACKENDS", "ExecResult", "Sandbox", "SandboxProvider", "SandboxSpec", "open_provider"]


def open_provider(name: str, **settings: Any) -> SandboxProvider:
    """Make the provider ``name`` with its own settings (see its class).

    Raises:
        ConfigError: there is no such backend, or it has no such setting.
        SandboxStartError: this machine lacks what it needs.
    """
    try:
        if name == "bubblewrap":
            from termrl.sandboxes.bubblewrap import BubblewrapProvider

            return BubblewrapProvider(**settings)
        if name == "docker":
            from termrl.sandboxes.docker.provider import DockerProvider

            return DockerProvider(**settings)
    except TypeError as error:
        raise ConfigError(f"sandbox: {name}: {error}") from error
    raise ConfigError(f"sandbox: {name}: there is no such backend", hint=f"there are: {', '.join(BACKENDS)}")
