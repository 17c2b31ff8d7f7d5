"""State folders of the tests' own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from termrl.sandboxes.sweep import sweep


@contextmanager
def own_state() -> Iterator[Path]:
    """A state folder that a sandbox's user can walk to; what dead owners left is swept before it goes."""
    with tempfile.TemporaryDirectory(prefix="termrl-test-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            sweep(folder)


@contextmanager
def in_own_state() -> Iterator[Path]:
    """The same, and what runs here or is started from here uses it."""
    with own_state() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERMRL_STATE_DIR", str(folder))
        yield folder
