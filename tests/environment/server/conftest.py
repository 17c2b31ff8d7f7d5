"""One server for the tests that leave it as it was; others start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment.server.served import Server, served, write_task


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two solvable tasks, one whose tests never give a reward, one whose tests time out by themselves."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "one")
    write_task(folder, "two")
    write_task(folder, "silent", test="exit 3\n")
    return folder


@pytest.fixture(scope="module")
def server(tasks: Path) -> Iterator[Server]:
    """A server that is empty after every test of a module."""
    with served(tasks, "--default-task-id", "one") as up:
        yield up
