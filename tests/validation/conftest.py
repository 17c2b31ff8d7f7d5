"""A real provider for each test, over a state folder of these tests' own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from termrl.sandboxes.base import SandboxProvider
from tests.states import in_own_state
from tests.verifier.tiny import tiny_provider


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[Path]:
    """A state folder where a sandbox's user can walk to."""
    with in_own_state() as folder:
        yield folder


@pytest.fixture
async def provider() -> AsyncIterator[SandboxProvider]:
    async with tiny_provider() as provider:
        yield provider
