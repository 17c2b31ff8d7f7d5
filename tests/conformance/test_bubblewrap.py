"""The bubblewrap backend holds the conformance suite, with cgroups and without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from termrl.sandboxes import open_provider
from termrl.sandboxes.cgroups import find_roots
from termrl.sandboxes.conformance import CHECKS, Check, Subject
from tests.conformance.suite import Suite, chosen


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["auto", "off"])
async def suite(request: pytest.FixtureRequest, state: Path) -> AsyncIterator[Suite]:
    if request.param == "auto" and find_roots() is None:
        pytest.skip("no cgroups can be made here; the other half of the tests is without")
    settings = {"state": str(state), "cgroups": request.param}
    async with open_provider("bubblewrap", **settings) as provider:
        running = Suite(Subject(provider, backend="bubblewrap", settings=settings), chosen(request))
        yield running
        await running.stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.section}-{check.name}")
async def test_bubblewrap_holds(check: Check, suite: Suite) -> None:
    await suite.holds(check)
