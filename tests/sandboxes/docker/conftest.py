"""An open provider on the real daemon, and how its sandboxes are made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.docker.container import DockerSandbox
from termrl.sandboxes.docker.provider import DockerProvider


@pytest.fixture
async def provider(state: Path, docker_required: None) -> AsyncIterator[DockerProvider]:
    async with DockerProvider(state=state, images={"pull_attempts": 1}) as provider:
        yield provider


@pytest.fixture
def spec(docker_image: str) -> SandboxSpec:
    return SandboxSpec("a-task", image=docker_image)


@pytest.fixture
async def sandbox(provider: DockerProvider, spec: SandboxSpec) -> AsyncIterator[DockerSandbox]:
    sandbox = await provider.create(spec)
    yield sandbox
    await sandbox.stop()
