"""An evaluation from its settings to its summary: the scheduler's episodes, recorded as each one ends."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from termrl.agent.prompts import opening
from termrl.agent.types import Episode
from termrl.errors import PolicyError
from termrl.evaluation.config import EvalConfig
from termrl.evaluation.endpoint import check_endpoint
from termrl.evaluation.keys import api_key
from termrl.evaluation.policies import LocalModel, find_model, identity, open_policy
from termrl.evaluation.report import scores, summarise
from termrl.evaluation.results import result_line
from termrl.evaluation.store import EvalStore
from termrl.evaluation.tasks import Tasks, check_suite, folder_tasks, suite_tasks
from termrl.rollout.environments import TASKS, given_environments
from termrl.rollout.groups import cause_of
from termrl.rollout.pools import check_runnable
from termrl.rollout.scheduler import Attempt, Scheduler
from termrl.rollout.seeds import derive_seed
from termrl.runs.ending import told_why
from termrl.runs.inputs import check_inputs
from termrl.runs.store import versions
from termrl.sandboxes import SandboxProvider, open_provider
from termrl.tasks.task import Task
from termrl.training.events import Watcher
from termrl.verifier.verdict import Cause

Say = Callable[[str], None]

# The image store has bounded retries of its own.
_NOT_AGAIN = frozenset({Cause.IMAGE_UNAVAILABLE})


@dataclass(frozen=True)
class Prepared:
    """What :func:`prepare` found.

    Attributes:
        model: the model that runs in this process; ``None`` for an endpoint.
        key: for the endpoint; never printed or written.
        tasks: by id; ``None`` for the bundled suite, which is written into the folder.
    """

    model: LocalModel | None
    key: str | None = None
    tasks: Tasks | None = None

    def __repr__(self) -> str:
        return f"Prepared({self.model})"


def prepare(config: EvalConfig, say: Say, environ: Mapping[str, str] | None = None) -> Prepared:
    """Everything that can be refused before a folder is made: tasks, sandbox or server, model or endpoint.

    Args:
        say: told what is odd or waited for.

    Raises:
        TermrlError: whatever is wrong with any of them.
    """
    opening(config.episode.opening)
    check_suite(config.tasks)
    tasks = folder_tasks(config.tasks) if config.tasks.dir is not None else None
    key = api_key(config.policy, os.environ if environ is None else environ)
    model = find_model(config.policy.model) if config.policy.base_url is None else None
    asyncio.run(_check_places(config, tasks, key, say))
    return Prepared(model, key, tasks)


async def _check_places(config: EvalConfig, tasks: Tasks | None, key: str | None, say: Say) -> None:
    if config.environment.url is not None:
        from termrl.rollout.preflight import check_server

        with tempfile.TemporaryDirectory(prefix="termrl-") as folder:
            known = tasks or suite_tasks(config.tasks, Path(folder, TASKS))
            sessions = min(config.concurrency, len(known) * config.samples)
            await check_server(config.environment, known, sessions=sessions, lockstep=False, say=say)
    else:
        async with open_provider(config.sandbox.backend, **config.sandbox_settings()) as provider:
            check_runnable(tasks or {}, provider)
    if config.policy.base_url is not None:
        await check_endpoint(config, key, say)


async def evaluate(
    config: EvalConfig,
    store: EvalStore,
    watcher: Watcher,
    *,
    prepared: Prepared,
    say: Say = lambda line: None,
    open_sandboxes: Callable[..., SandboxProvider] = open_provider,
) -> dict[str, Any]:
    """Make every attempt that ``store`` has no result of, write ``summary.json`` (on every path) and return it.

    An attempt without a verdict is made again, ``retries`` times, and recorded as what it is in the end.

    Args:
        config: the resolved settings.
        store: the folder, held by this process.
        watcher: told what happens, as of a training run's evaluation.
        prepared: from :func:`prepare`.
        say: told what a user should know.
        open_sandboxes: makes the sandbox provider.

    Raises:
        RunError: the model or the tasks are not those that the evaluation began with.
        TaskError, ConfigError: a task that the environment can never run.
        CancelledError: interrupted.
    """
    started = time.monotonic()
    tasks = prepared.tasks or suite_tasks(config.tasks, store.path / TASKS)
    policy = identity(config.policy, prepared.model)
    check_inputs(store.path, model="\n".join(f"{name}={value}" for name, value in policy.items()), tasks=tasks)
    store.drop_lost()
    evaluation = _Evaluation(config, store, watcher, tasks)
    try:
        with told_why(evaluation):
            await evaluation.run(prepared, say, open_sandboxes)
    finally:
        summary = {
            **summarise(store.results.values(), tasks=list(tasks), samples=config.samples),
            "stopped": evaluation.stopped,
            "wall_s": round(time.monotonic() - started, 3),
            "policy": policy,
            "seed": config.seed,
            "run_dir": str(store.path),
            "versions": versions(),
        }
        store.write_summary(summary)
    watcher.evaluated("evaluation", scores(store.results.values()))
    watcher.finished(summary, {})
    return summary


class _Evaluation:
    """The attempts of one process."""

    def __init__(self, config: EvalConfig, store: EvalStore, watcher: Watcher, tasks: Tasks) -> None:
        self._config = config
        self._store = store
        self._watcher = watcher
        self._tasks = tasks
        self._attempts = {attempt.seed: attempt for attempt in plan(config, list(tasks.values()))}
        self._running: asyncio.Future[list[Episode]] | None = None
        self._row: tuple[str, int] = ("", 0)
        self.stopped: str | None = None

    async def run(self, prepared: Prepared, say: Say, open_sandboxes: Callable[..., SandboxProvider]) -> None:
        config, done = self._config, self._store.results
        left = [attempt for attempt in self._attempts.values() if (attempt.task_id, attempt.sample) not in done]
        self._watcher.started(self._store.path, steps=0, first_step=1)
        self._watcher.phase("evaluate", step=0, total=len(left))
        if not left:
            return
        async with AsyncExitStack() as stack:
            opened = given_environments(config, self._tasks, open_sandboxes=open_sandboxes)
            environments = await stack.enter_async_context(opened)
            self._watcher.sandboxes(environments.live)

            async def recover() -> None:
                await asyncio.sleep(config.retry_wait_s)
                if environments.recover is not None:
                    await environments.recover()

            policy = open_policy(config, prepared.model, prepared.key, fatal=self._fatal, say=say)
            scheduler = Scheduler(
                environments=environments.factory,
                sessions=await stack.enter_async_context(policy),
                gate=None,
                opening=opening(config.episode.opening),
                concurrency=config.concurrency,
                bounds=config.bounds(),
                retries=config.retries,
                replay=self._again,
                recover=recover,
            )
            limits = config.episode.limits(evaluating=True)
            temperature = config.sampling.temperature
            self._running = asyncio.ensure_future(
                scheduler.run(left, limits=limits, temperature=temperature, on_end=self._ended)
            )
            try:
                await self._running
            except asyncio.CancelledError:
                this = asyncio.current_task()
                if self.stopped is None or (this is not None and this.cancelling()):
                    raise

    def _ended(self, episode: Episode) -> None:
        """Record an attempt that is not made again."""
        attempt = self._attempts[episode.seed]
        self._store.add(result_line(episode, attempt, self._tasks[attempt.task_id]))
        self._watcher.episode(episode)

    def _again(self, episode: Episode) -> bool:
        """Whether an attempt is worth making again; one cause that fails them all ends the evaluation."""
        if episode.reward is not None:
            self._row = ("", 0)
            return False
        cause = cause_of(episode)
        self._row = (cause, self._row[1] + 1 if self._row[0] == cause else 1)
        if self._row[1] >= self._config.streak:
            why = episode.error or (episode.verdict.detail if episode.verdict is not None else "")
            self._stop(f"{self._row[1]} attempts in a row had no verdict for one cause: {cause}: {why}".rstrip(": "))
        return self.stopped is None and cause not in _NOT_AGAIN

    def _fatal(self, error: PolicyError) -> None:
        self._stop(f"{error.message} ({error.hint})" if error.hint else error.message)

    def _stop(self, why: str) -> None:
        if self.stopped is None and self._running is not None:
            self.stopped = why
            self._running.cancel()


def plan(config: EvalConfig, tasks: Sequence[Task]) -> list[Attempt]:
    """All attempts: every task once before any is attempted again, so that what a stop leaves undone is even."""
    return [
        Attempt(
            task.id,
            task.family,
            group,
            sample,
            seed=derive_seed(config.seed, "evaluation", task.id, sample),
            order=sample * len(tasks) + group,
        )
        for sample in range(config.samples)
        for group, task in enumerate(tasks)
    ]
