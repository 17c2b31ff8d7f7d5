"""The bubblewrap backend holds the conformance suite, with cgroups and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.sandboxes import open_provider
from termrl.sandboxes.cgroups import find_roots
from termrl.sandboxes.conformance import CHECKS, Check, Subject
from termrl.sandboxes.conformance.check import NotHere


@pytest.mark.parametrize("cgroups", ["auto", "off"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.section}-{check.name}")
async def test_bubblewrap_holds(check: Check, cgroups: str, state: Path) -> None:
    if cgroups == "auto" and find_roots() is None:
        pytest.skip("no cgroups can be made here; the other half of the tests is without")
    settings = {"state": str(state), "cgroups": cgroups}
    async with open_provider("bubblewrap", **settings) as provider:
        try:
            failure = await check.run(Subject(provider, backend="bubblewrap", settings=settings))
        except NotHere as reason:
            pytest.skip(str(reason))
    assert failure is None, f"{check.what}: {failure.message}"
