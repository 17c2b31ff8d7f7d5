"""The backends that attacks are tried on, each with a real provider."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from termrl.sandboxes.base import SandboxProvider
from tests.attacks.backends import BACKENDS, need, open_backend
from tests.attacks.kinds import python_image_of, remove_python_image
from tests.docker import missing


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend that works here."""
    need(request.param)
    return request.param


@pytest.fixture
async def provider(backend: str) -> AsyncIterator[SandboxProvider]:
    """A provider that is closed, with nothing left alive, at the end."""
    async with open_backend(backend) as provider:
        yield provider
    assert provider.live == 0


@pytest.fixture
async def docker(docker_required: None) -> AsyncIterator[SandboxProvider]:
    """Containers, for what only they allow."""
    async with open_backend("docker") as provider:
        yield provider
    assert provider.live == 0


@pytest.fixture(scope="session")
def python_image() -> str:
    """An image whose Python has pytest and pip; no image where there is no daemon."""
    return "" if missing() else python_image_of()


@pytest.fixture(scope="session", autouse=True)
def _no_image_left() -> Iterator[None]:
    yield
    if python_image_of.cache_info().currsize:
        remove_python_image()
