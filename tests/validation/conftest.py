"""A real provider for each test, over a state folder of these tests' own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from termrl.sandboxes.base import SandboxProvider
from tests.verifier.tiny import tiny_provider


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[Path]:
    """A state folder where a sandbox's user can walk to."""
    with tempfile.TemporaryDirectory(prefix="termrl-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERMRL_STATE_DIR", folder)
            yield Path(folder)


@pytest.fixture
async def provider() -> AsyncIterator[SandboxProvider]:
    async with tiny_provider() as provider:
        yield provider
