"""The Docker backend holds the conformance suite on a real daemon."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from termrl.sandboxes import open_provider
from termrl.sandboxes.conformance import CHECKS, Check, Subject
from termrl.sandboxes.conformance.check import small_spec
from tests.conformance.suite import Suite, chosen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(request: pytest.FixtureRequest, state: Path, docker_image: str) -> AsyncIterator[Suite]:
    settings = {"state": str(state)}
    spec = dataclasses.replace(small_spec(), host_userland=False, image=docker_image)
    async with open_provider("docker", **settings) as provider:
        running = Suite(Subject(provider, spec=spec, backend="docker", settings=settings), chosen(request))
        yield running
        await running.stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.section}-{check.name}")
async def test_docker_holds(check: Check, suite: Suite) -> None:
    await suite.holds(check)
