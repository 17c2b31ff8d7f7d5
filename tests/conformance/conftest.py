"""A state folder for the session's own providers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def state() -> Iterator[Path]:
    """A state folder that other users may walk into (sandboxes of root run as one)."""
    folder = Path(tempfile.mkdtemp(prefix="termrl-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
