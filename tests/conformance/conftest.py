"""A state folder for the session's own providers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.states import own_state


@pytest.fixture(scope="session")
def state() -> Iterator[Path]:
    """A state folder that other users may walk into (sandboxes of root run as one)."""
    with own_state() as folder:
        yield folder
