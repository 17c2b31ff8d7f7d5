"""What holds for every test."""

from __future__ import annotations

import signal

import pytest

from tests.docker import IMAGE, need_docker

# A suite that was started in the background has SIGINT ignored, and every process that it starts would inherit that:
# then no test of Ctrl-C could reach its program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def docker_image() -> str:
    """The name of the image that tests on a real daemon use; skips without a daemon, but fails in CI."""
    need_docker()
    return IMAGE


@pytest.fixture(scope="session")
def docker_required() -> None:
    """For tests that need a real daemon but no particular image."""
    need_docker()
