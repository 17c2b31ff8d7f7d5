"""Backends by name, and whether this machine has them."""

from __future__ import annotations

from functools import cache
from typing import Any

from termrl.sandboxes import open_provider
from termrl.sandboxes.base import SandboxProvider

BACKENDS = ("bubblewrap", "docker")
IMAGE = "termrl-test/base:bookworm"

_SETTINGS: dict[str, dict[str, Any]] = {"docker": {"host_image": IMAGE}}


@cache
def missing(backend: str) -> str:
    """Why ``backend`` cannot be tried here, or an empty text."""
    if backend != "docker":
        return ""
    docker = __import__("docker")
    try:
        docker.from_env(timeout=10).images.get(IMAGE)
    except Exception as error:
        return f"no dockerd with {IMAGE}: {str(error)[:100]}"
    return ""


def open_backend(backend: str) -> SandboxProvider:
    """A provider for tasks that run on any host's programs."""
    return open_provider(backend, **_SETTINGS.get(backend, {}))
