"""The Docker backend holds the conformance suite on a real daemon."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from termrl.sandboxes import open_provider
from termrl.sandboxes.conformance import CHECKS, Check, Subject
from termrl.sandboxes.conformance.check import NotHere, small_spec


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.section}-{check.name}")
async def test_docker_holds(check: Check, state: Path, docker_image: str) -> None:
    settings = {"state": str(state)}
    spec = dataclasses.replace(small_spec(), host_userland=False, image=docker_image)
    async with open_provider("docker", **settings) as provider:
        try:
            failure = await check.run(Subject(provider, spec=spec, backend="docker", settings=settings))
        except NotHere as reason:
            pytest.skip(str(reason))
    assert failure is None, f"{check.what}: {failure.message}"
