"""A real provider for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from termrl.sandboxes.base import SandboxProvider
from tests.verifier.tiny import tiny_provider


@pytest.fixture
async def provider() -> AsyncIterator[SandboxProvider]:
    async with tiny_provider() as provider:
        yield provider
