"""Trying every task: its solution and doing nothing, several times each, in sandboxes of their own."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from termrl import __version__
from termrl.errors import CommandError, SandboxError, TaskError
from termrl.rollout.bounded import within
from termrl.sandboxes.base import SandboxProvider
from termrl.tasks.task import Task
from termrl.tasks.taskset import TaskSet
from termrl.validation.judge import judge
from termrl.validation.records import Attempt, Kind, Report, Solved, Status, TaskReport
from termrl.verifier.causes import ATTRIBUTABLE_CAUSES, Cause
from termrl.verifier.oracle import DEFAULT_SOLUTION_TIMEOUT_S, try_task
from termrl.verifier.redaction import Redactor
from termrl.verifier.verdict import Outcome, Verdict

_BACKOFF_S = (1.0, 5.0, 15.0, 30.0)
_LOG_CHARS = 8000
_START_S = 900.0
_GRACE_S = 120.0
# The image store has its own bounded retries.
_ONCE = frozenset({Cause.IMAGE_UNAVAILABLE})


@dataclass(frozen=True)
class Plan:
    """How a study is made.

    Attributes:
        repeat: attempts of each kind for each task.
        concurrency: sandboxes at once.
        retries: how often an attempt that the machine failed is made again.
        stop_after: so many attempts in a row that the machine failed, of whatever tasks, end the study.
        backoff_s: seconds before the first, second, … retry; the last holds for all further ones.
    """

    repeat: int = 2
    concurrency: int = 4
    retries: int = 2
    stop_after: int = 20
    backoff_s: tuple[float, ...] = _BACKOFF_S


@dataclass
class Follower:
    """Told what happens; every call is quick."""

    planned: Callable[[int, int], None] = lambda attempts, kept: None
    started: Callable[[str], None] = lambda task_id: None
    attempt: Callable[[Attempt], None] = lambda attempt: None
    task: Callable[[str, TaskReport], None] = lambda task_id, report: None


@dataclass
class Study:
    """One study over a task set; call :meth:`run` once, :meth:`report` whenever.

    Args:
        tasks: what is tried; what is broken in it is part of the report.
        provider: where.
        kept: attempts of an earlier process that need not be made again.
    """

    tasks: TaskSet
    provider: SandboxProvider
    plan: Plan = field(default_factory=Plan)
    kept: Iterable[Attempt] = ()
    follower: Follower = field(default_factory=Follower)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._attempts: dict[str, list[Attempt]] = defaultdict(list)
        self._results: dict[str, TaskReport] = {}
        self._in_a_row = 0
        self._stopped = ""
        for attempt in self.kept:
            if attempt.round < self.plan.repeat:
                self._attempts[attempt.task_id].append(attempt)
        for name, why in self.tasks.broken.items():
            self._results[name] = TaskReport(status=Status.BROKEN, detail=why)
        self._left: dict[str, deque[tuple[Kind, int]]] = {
            task.id: deque(self._wanted(task)) for task in self.tasks.values()
        }
        self._running: dict[str, int] = defaultdict(int)

    async def run(self) -> Report:
        """Make every attempt that is missing and return the report.

        Cancelling this stops every sandbox; what was tried by then is in :meth:`report`.
        """
        kept = sum(len(attempts) for attempts in self._attempts.values())
        self.follower.planned(sum(len(left) for left in self._left.values()), kept)
        for task in self.tasks.values():
            self._settle(task)
        queue: deque[tuple[Task, Kind, int]] = deque(
            (task, kind, n) for task in self.tasks.values() for kind, n in self._left[task.id]
        )

        async def worker() -> None:
            while queue and not self._stopped:
                task, kind, n = queue.popleft()
                if (kind, n) in self._left[task.id]:
                    await self._make(task, kind, n)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.plan.concurrency):
                    group.create_task(worker())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self.report()

    def report(self) -> Report:
        """What is known by now."""
        return Report(
            tasks=str(self.tasks.path),
            sandbox=self.provider.name,
            repeat=self.plan.repeat,
            complete=len(self._results) == len(self.tasks) + len(self.tasks.broken),
            stopped=self._stopped,
            wall_s=round(time.monotonic() - self._started, 3),
            termrl=__version__,
            results=dict(self._results),
        )

    def _wanted(self, task: Task) -> Iterator[tuple[Kind, int]]:
        kinds: tuple[Kind, ...] = ("nop",) if task.solution is None else ("oracle", "nop")
        done = {(attempt.kind, attempt.round) for attempt in self._attempts[task.id]}
        for n in range(self.plan.repeat):
            for kind in kinds:
                if (kind, n) not in done:
                    yield kind, n

    async def _make(self, task: Task, kind: Kind, n: int) -> None:
        self._left[task.id].remove((kind, n))
        self._running[task.id] += 1
        self.follower.started(task.id)
        try:
            attempt = await self._attempt(task, kind, n)
        finally:
            self._running[task.id] -= 1
        self._attempts[task.id].append(attempt)
        self._count(attempt)
        if _hopeless(attempt):
            self._left[task.id].clear()
        self.follower.attempt(attempt)
        self._settle(task)

    def _settle(self, task: Task) -> None:
        if task.id not in self._results and not self._left[task.id] and not self._running[task.id]:
            self._results[task.id] = found = judge(task, self._attempts[task.id])
            self.follower.task(task.id, found)

    def _count(self, attempt: Attempt) -> None:
        cause = attempt.verdict.cause if attempt.verdict is not None and not attempt.scored else None
        if attempt.refusal:
            return
        self._in_a_row = self._in_a_row + 1 if cause is not None and cause not in ATTRIBUTABLE_CAUSES else 0
        if self._in_a_row >= self.plan.stop_after and not self._stopped and attempt.verdict is not None:
            self._stopped = f"{self._in_a_row} attempts in a row failed by the machine; the last: {cause}: " + (
                attempt.verdict.detail
            )

    async def _attempt(self, task: Task, kind: Kind, n: int) -> Attempt:
        known = Attempt(task_id=task.id, digest=task.digest, sandbox=self.provider.name, kind=kind, round=n)
        if refusal := self.provider.refusal(task.sandbox):
            return known.model_copy(update={"refusal": refusal})
        retried: list[str] = []
        while True:
            attempt = await self._try(task, known)
            cause = attempt.verdict.cause if attempt.verdict is not None and not attempt.scored else None
            final = cause is None or cause in ATTRIBUTABLE_CAUSES or cause in _ONCE
            if final or len(retried) >= self.plan.retries:
                return attempt.model_copy(update={"retried": tuple(retried)})
            retried.append(str(cause))
            await asyncio.sleep(self.plan.backoff_s[min(len(retried), len(self.plan.backoff_s)) - 1])

    async def _try(self, task: Task, known: Attempt) -> Attempt:
        budget_s = _budget_s(task)
        try:
            trial = await within(budget_s, try_task(self.provider, task, solve=known.kind == "oracle"))
        except TaskError as error:
            return known.model_copy(update={"refusal": Redactor(task).line(error.message)})
        except SandboxError as error:
            return _failed(task, known, Cause(error.cause), error.message)
        except TimeoutError:
            return _failed(task, known, Cause.ENVIRONMENT_LOST, f"the sandbox did not come back in {budget_s:g} s")
        except (CommandError, OSError, ValueError) as error:
            return _failed(task, known, Cause.ENVIRONMENT_LOST, f"{type(error).__name__}: {error}")
        solved = None
        if trial.solution is not None:
            ended = trial.solution
            solved = Solved(
                exit_code=ended.exit_code, timed_out=ended.timed_out, output_tail=ended.output[-_LOG_CHARS:]
            )
        times = {"start_s": trial.start_s, "solve_s": trial.solve_s, "verify_s": trial.verify_s}
        return known.model_copy(update={"verdict": trial.verdict, "solved": solved, **times})


def _failed(task: Task, known: Attempt, cause: Cause, detail: str) -> Attempt:
    return known.model_copy(update={"verdict": Verdict.missing(cause, Redactor(task).line(detail))})


def _hopeless(attempt: Attempt) -> bool:
    """Whether no other attempt of the task can say more."""
    verdict = attempt.verdict
    return verdict is None or (verdict.outcome is Outcome.NO_VERDICT and verdict.cause in _ONCE)


def _budget_s(task: Task) -> float:
    build_s = task.sandbox.build.timeout_s if task.sandbox.build is not None else 0.0
    solve_s = task.agent_timeout_s or DEFAULT_SOLUTION_TIMEOUT_S
    return _START_S + build_s + solve_s + task.verifier_timeout_s + _GRACE_S
