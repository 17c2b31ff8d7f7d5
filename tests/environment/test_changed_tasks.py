"""A task that changes on disk while a run goes on ends the run with the task's name; no reward comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from termrl.agent.types import Limits, Message, Opening, Reply
from termrl.environment.protocol import Action
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.errors import TaskError
from termrl.rollout.scheduler import Attempt, PolicySession, Scheduler
from termrl.sandboxes.base import SandboxProvider
from termrl.tasks import TaskSet
from tests.validation.tasks import add

EVALUATE = Action(action_type="evaluate")
CHANGED = r"good: changed on disk since it was loaded: tests/test\.sh"


@pytest.fixture
async def tasks(tmp_path: Path) -> TaskSet:
    add(tmp_path, "good")
    add(tmp_path, "other")
    loaded = TaskSet.load(tmp_path)
    # the kernel's clock for files ticks every few milliseconds
    await asyncio.sleep(0.02)
    return loaded


def weaken(tasks: TaskSet) -> None:
    (tasks["good"].tests / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")


async def test_reset_and_evaluate_refuse_it_and_other_tasks_go_on(provider: SandboxProvider, tasks: TaskSet) -> None:
    factory = LocalEnvironmentFactory(tasks, provider)
    environment = factory.create()
    try:
        await environment.reset("good")
        weaken(tasks)
        with pytest.raises(TaskError, match=CHANGED):
            await environment.step(EVALUATE)
        with pytest.raises(TaskError, match=CHANGED):
            await environment.reset("good")
        await environment.reset("other")
        assert (await environment.step(EVALUATE)).reward == 0
    finally:
        await environment.close()


class Weakens:
    """A policy in whose first turn somebody changes the task."""

    def __init__(self, tasks: TaskSet) -> None:
        self.tasks = tasks

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        weaken(self.tasks)
        text = "TASK_COMPLETE"
        return Reply({"role": "assistant", "content": text}, text, "stop")


class Sessions:
    def __init__(self, tasks: TaskSet) -> None:
        self.tasks = tasks

    @asynccontextmanager
    async def open(self, order: int, *, temperature: float) -> AsyncIterator[PolicySession]:
        yield PolicySession(policy=Weakens(self.tasks), segments=tuple, counters=dict)

    async def settle(self) -> None:
        return


async def test_a_run_ends_with_the_name_of_the_task(provider: SandboxProvider, tasks: TaskSet) -> None:
    scheduler = Scheduler(
        environments=LocalEnvironmentFactory(tasks, provider),
        sessions=Sessions(tasks),
        gate=None,
        opening=Opening(({"role": "system", "content": "act"},)),
        concurrency=2,
    )
    attempts = [Attempt(task_id="good", family="f", group=0, sample=n, seed=n, order=n) for n in range(2)]
    with pytest.raises(TaskError, match=CHANGED):
        await scheduler.run(attempts, limits=Limits(max_turns=2, max_tokens=8), temperature=1.0)
    assert provider.live == 0
