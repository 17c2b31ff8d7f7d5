"""What the server takes of openenv 0.10, imported without what a server never uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from termrl.errors import ConfigError


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Make ``import name`` fail for a while, unless it is there already."""
    absent = name not in sys.modules
    if absent:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        if absent:
            del sys.modules[name]


try:
    # Work-round: openenv imports gradio (2 s, 100 MB, pandas) for a web page that is not served; it copes without.
    with _without("gradio"):
        from openenv.core.env_server.exceptions import EnvironmentFactoryError, SessionCapacityError
        from openenv.core.env_server.http_server import HTTPEnvServer
        from openenv.core.env_server.interfaces import Environment
        from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
except ImportError as error:
    raise ConfigError(
        f"termrl serve needs the package openenv, which cannot be imported: {error}",
        hint="pip install 'termrl[openenv]'",
    ) from None

__all__ = [
    "Action",
    "Environment",
    "EnvironmentFactoryError",
    "EnvironmentMetadata",
    "HTTPEnvServer",
    "Observation",
    "SessionCapacityError",
    "State",
]
