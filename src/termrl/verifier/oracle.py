"""The golden check of a task: its own solution must score 1 and doing nothing must score 0."""

from __future__ import annotations

from dataclasses import dataclass

from termrl.errors import TaskError
from termrl.sandboxes.base import ExecResult, Sandbox, SandboxProvider
from termrl.tasks.env import resolve_env
from termrl.tasks.ignore import excluded_paths
from termrl.tasks.task import Task
from termrl.verifier.tamper import take_baseline
from termrl.verifier.verdict import Outcome, Verdict
from termrl.verifier.verify import verify

SOLUTION = "/solution"
DEFAULT_SOLUTION_TIMEOUT_S = 600.0


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
        How solve.sh ended; a non-zero exit is for the caller to note, the tests run all the same.

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
    return await sandbox.exec(f'"$BASH" {SOLUTION}/solve.sh', timeout_s=budget, env=env)


async def golden_check(provider: SandboxProvider, task: Task, *, timeout_s: float | None = None) -> GoldenCheck:
    """Verify ``task`` after its own solution and after nothing, each in a sandbox of its own.

    Raises:
        TaskError: the task has no solution, or the provider refuses it.
        SandboxError: a sandbox could not be started or was lost while solving.
    """
    sandbox = await provider.create(task.resolved_sandbox())
    try:
        baseline = await take_baseline(sandbox, task)
        solution = await run_solution(sandbox, task, timeout_s=timeout_s)
        oracle = await verify(sandbox, task, baseline=baseline)
    finally:
        await sandbox.stop()
    sandbox = await provider.create(task.resolved_sandbox())
    try:
        nop = await verify(sandbox, task)
    finally:
        await sandbox.stop()
    return GoldenCheck(oracle=oracle, nop=nop, solution=solution)
