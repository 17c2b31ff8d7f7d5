"""What holds for every test."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests import docker

# A suite that was started in the background has SIGINT ignored, and every process that it starts would inherit that:
# then no test of Ctrl-C could reach its program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run tests, those of a file stay together, as their fixtures do.

    All that use the Docker daemon are one process's: a provider removes what any dead owner left on it, and a test that
    counts that must be alone.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            group = docker.GROUP if _uses_docker(item) else item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """See :func:`tests.docker.need_docker`."""
    group = item.get_closest_marker("xdist_group")
    docker.running = group.args[0] if group is not None else None
    if "PYTEST_XDIST_WORKER" in os.environ and not item.nodeid.endswith(f"@{docker.running}"):
        pytest.fail("this pytest-xdist does not keep the groups of this pytest")


def _uses_docker(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    return bool(fixtures & {"docker_image", "docker_required"}) or "docker" in re.split(r"\W", item.name)


@pytest.fixture(scope="session")
def docker_image() -> str:
    """The name of the image that tests on a real daemon use; skips without a daemon, but fails in CI."""
    docker.need_docker()
    return docker.IMAGE


@pytest.fixture(scope="session")
def docker_required() -> None:
    """For tests that need a real daemon but no particular image."""
    docker.need_docker()
