"""The world of the end-to-end tests: a state folder of their own, a tiny model, tasks to train on and to hold out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.endtoend.tiny import write_model, write_tasks
from tests.states import in_own_state


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[Path]:
    """A state folder of these tests' own, where a sandbox's user can walk to."""
    with in_own_state() as folder:
        yield folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder / "model")
    write_tasks(folder / "train", ("apple", "berry"))
    write_tasks(folder / "held-out", ("cedar",), prefix="eval")
    return folder
