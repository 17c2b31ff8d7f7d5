from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from termrl.capture.render import ChatMLRenderer
from termrl.capture.server import serve
from termrl.integrations.miles import agent, groups, parts
from termrl.integrations.miles.report import TALLY
from tests.capture.fakes import FakeUpstream, small_tokenizer
from tests.endtoend.tiny import write_tasks
from tests.integrations.miles.fakemiles import FakeMiles, Sample
from tests.integrations.miles.scripts import ScriptedUpstream

Open = Callable[..., AbstractAsyncContextManager[FakeMiles]]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the machine's, no count of an earlier test, and nothing left open."""
    for variable in list(os.environ):
        if variable.startswith(("OPENENV_", "MILES_", "AGENT_MODEL_NAME", "TERMRL_TOKEN")):
            monkeypatch.delenv(variable)
    TALLY.take()
    TALLY.faults.clear()
    monkeypatch.setattr(groups, "_lost_in_a_row", 0)
    yield
    assert not agent._running
    assert not parts._by_loop


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks, each solved by making the directory that it names."""
    return write_tasks(tmp_path / "tasks", ("apple", "berry"))


@pytest.fixture
def sandboxes(monkeypatch: pytest.MonkeyPatch, tasks: Path) -> None:
    """Each episode has a bubblewrap sandbox of its own."""
    monkeypatch.setenv("OPENENV_SANDBOX_BACKEND", "bubblewrap")
    monkeypatch.setenv("OPENENV_TB2_TASKS_DIR", str(tasks))
    monkeypatch.setenv("OPENENV_CONFIG", str(_quick(tasks.parent)))


def _quick(folder: Path) -> Path:
    path = folder / "agent.toml"
    path.write_text("retry_wait_s = 0.01\n")
    return path


@pytest.fixture
def miles() -> Open:
    """miles in front of a scripted policy: ``async with miles("reply of turn 1", …, **options) as worker``."""

    @asynccontextmanager
    async def opened(*script: Any, upstream: FakeUpstream | None = None, **options: Any) -> AsyncIterator[FakeMiles]:
        tokenizer = small_tokenizer()
        engine = upstream or ScriptedUpstream(tokenizer, script)
        async with serve(engine, ChatMLRenderer(tokenizer)) as server, FakeMiles(server.url, **options) as worker:
            yield worker

    return opened


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """A sample of a task."""

    def made(task_id: str = "make-apple", **metadata: Any) -> Sample:
        prompt = [{"role": "system", "content": "You solve tasks."}]
        return Sample(0, 0, prompt, {"task_id": task_id, **metadata})

    return made
