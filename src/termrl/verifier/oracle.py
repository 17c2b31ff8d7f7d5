"""The golden check of a task: its own solution must score 1 and doing nothing must score 0."""

from __future__ import annotations

import time
from dataclasses import dataclass

from termrl.errors import TaskError
from termrl.sandboxes.base import ExecResult, Sandbox, SandboxProvider
from termrl.tasks.env import resolve_env
from termrl.tasks.ignore import excluded_paths
from termrl.tasks.task import Task
from termrl.verifier.redaction import Redactor
from termrl.verifier.tamper import take_baseline
from termrl.verifier.verdict import Outcome, Verdict
from termrl.verifier.verify import verify

SOLUTION = "/solution"
DEFAULT_SOLUTION_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Trial:
    """What the tests said of one sandbox in which the solution was run, or nothing.

    Attributes:
        solution: how solve.sh ended (its exit code decides nothing); ``None`` where nothing was run.
        start_s, solve_s, verify_s: seconds for the sandbox, the solution and the tests.
    """

    verdict: Verdict
    solution: ExecResult | None
    start_s: float
    solve_s: float
    verify_s: float


@dataclass(frozen=True)
class GoldenCheck:
    """What oracle and nop scored. ``solution`` is how solve.sh ended (its exit code decides nothing)."""

    oracle: Verdict
    nop: Verdict
    solution: ExecResult

    @property
    def sound(self) -> bool:
        """Oracle passed and nop failed by the tests' own word."""
        return self.oracle.outcome is Outcome.PASSED and self.nop.outcome is Outcome.FAILED


async def run_solution(sandbox: Sandbox, task: Task, *, timeout_s: float | None = None) -> ExecResult:
    """Put the task's ``solution/`` at ``/solution`` and run its solve.sh from the workdir.

    Args:
        timeout_s: seconds; the task's agent timeout when ``None``, else 600.

    Returns:
        How solve.sh ended; a non-zero exit is for the caller to note, the tests run all the same. Values that the
        task's variables take from the host do not stand in its output.

    Raises:
        TaskError: the task has no solution, or ``[solution] env`` names a host variable that is not set.
        SandboxLostError: the sandbox died.
    """
    if task.solution is None:
        raise TaskError(f"{task.path}: no solution/solve.sh", hint="the oracle needs the task's own solution")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    env.update(resolve_env(task.solution_env, f"{task.path}/task.toml: solution.env"))
    await sandbox.put(task.solution, SOLUTION, exclude=excluded_paths(task.solution))
    budget = timeout_s or task.agent_timeout_s or DEFAULT_SOLUTION_TIMEOUT_S
    return Redactor(task).result(await sandbox.exec(f'"$BASH" {SOLUTION}/solve.sh', timeout_s=budget, env=env))


async def try_task(provider: SandboxProvider, task: Task, *, solve: bool, timeout_s: float | None = None) -> Trial:
    """Verify ``task`` in a sandbox of its own, after its solution or after nothing.

    Args:
        solve: run the solution first.
        timeout_s: seconds for the solution; the task's agent timeout when ``None``, else 600.

    Raises:
        TaskError: the task has no solution or changed on disk, the provider refuses it, or a host variable is not set.
        SandboxError: the sandbox could not be started, or was lost while solving.
    """
    task.check_unchanged()
    started = time.monotonic()
    sandbox = await provider.create(task.resolved_sandbox())
    try:
        baseline = await take_baseline(sandbox, task)
        ready = time.monotonic()
        solution = await run_solution(sandbox, task, timeout_s=timeout_s) if solve else None
        solved = time.monotonic()
        task.check_unchanged()
        verdict = await verify(sandbox, task, baseline=baseline)
        return Trial(verdict, solution, ready - started, solved - ready, time.monotonic() - solved)
    finally:
        await sandbox.stop()


async def golden_check(provider: SandboxProvider, task: Task, *, timeout_s: float | None = None) -> GoldenCheck:
    """Verify ``task`` after its own solution and after nothing, each in a sandbox of its own.

    Raises:
        TaskError: the task has no solution, or the provider refuses it.
        SandboxError: a sandbox could not be started or was lost while solving.
    """
    oracle = await try_task(provider, task, solve=True, timeout_s=timeout_s)
    assert oracle.solution is not None
    nop = await try_task(provider, task, solve=False)
    return GoldenCheck(oracle=oracle.verdict, nop=nop.verdict, solution=oracle.solution)
