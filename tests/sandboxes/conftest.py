"""Real sandboxes in a state folder of the test session's own, with and without cgroups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from termrl.sandboxes.base import Sandbox, SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider
from termrl.sandboxes.cgroups import find_roots
from tests.states import own_state


@pytest.fixture(scope="session")
def state() -> Iterator[Path]:
    """A state folder that other users may walk into (sandboxes of root run as one)."""
    with own_state() as folder:
        yield folder


@pytest.fixture(params=["auto", "off"])
async def provider(request: pytest.FixtureRequest, state: Path) -> AsyncIterator[BubblewrapProvider]:
    """A provider, once with cgroups (where there are some) and once without."""
    if request.param == "auto" and find_roots() is None:
        pytest.skip("no cgroups can be made here; the other half of the tests is without")
    async with BubblewrapProvider(state=state, cgroups=request.param) as made:
        yield made


@pytest.fixture
async def sandbox(provider: BubblewrapProvider) -> Sandbox:
    """One sandbox with small limits."""
    spec = SandboxSpec("sample", host_userland=True, memory_mb=256, storage_mb=64, pids=64)
    return await provider.create(spec)
