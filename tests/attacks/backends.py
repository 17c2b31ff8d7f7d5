"""Backends by name."""

from __future__ import annotations

from typing import Any

from termrl.sandboxes import open_provider
from termrl.sandboxes.base import SandboxProvider
from tests.docker import IMAGE, need_docker

BACKENDS = ("bubblewrap", "docker")

_SETTINGS: dict[str, dict[str, Any]] = {"docker": {"host_image": IMAGE}}


def need(backend: str) -> None:
    """Skip the test where ``backend`` cannot be tried; in CI it must be."""
    if backend == "docker":
        need_docker()


def open_backend(backend: str) -> SandboxProvider:
    """A provider for tasks that run on any host's programs."""
    return open_provider(backend, **_SETTINGS.get(backend, {}))
