"""What tests on a real Docker daemon share."""

from __future__ import annotations

import os
from functools import cache

import pytest

from termrl.errors import TermrlError

IMAGE = "termrl-test/base:bookworm"


@cache
def missing() -> str | None:
    """Why tests on a real daemon cannot run on this machine, or ``None``."""
    try:
        import docker.errors

        from termrl.sandboxes.docker.connection import Connection

        connection = Connection(threads=1)
    except (ImportError, TermrlError) as error:
        return str(error)
    try:
        connection.client.api.inspect_image(IMAGE)
    except docker.errors.APIError as error:
        return f"the image {IMAGE} is not in the daemon ({error.explanation})"
    finally:
        connection.close()
    return None


# The tests that use the daemon run in one process, see tests/conftest.py.
GROUP = "docker"
# The group of the test that runs.
running: str | None = None


def need_docker() -> None:
    """Skip the test, with the reason, where there is no daemon; fail where CI says that there must be one."""
    if running != GROUP:
        pytest.fail(f"a test that needs the Docker daemon must say so: @pytest.mark.xdist_group({GROUP!r})")
    why = missing()
    if why is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"Docker tests must run in CI: {why}")
    pytest.skip(why)
