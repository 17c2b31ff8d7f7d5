"""Runs attacks against tasks as training runs episodes: environment, verifier, attribution and rules."""

from __future__ import annotations

import asyncio
import posixpath
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from termrl.attacks.attack import Attack
from termrl.environment.protocol import Action, Environment
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.errors import TermrlError
from termrl.sandboxes.base import SandboxProvider
from termrl.tasks.env import resolve_env
from termrl.tasks.folder import entries
from termrl.tasks.ignore import excluded_paths
from termrl.tasks.task import Task
from termrl.verifier.oracle import DEFAULT_SOLUTION_TIMEOUT_S, SOLUTION
from termrl.verifier.rules import VerifyRules
from termrl.verifier.verdict import Outcome, Verdict

TURN_S = 10.0
HANG_S = 5.0

_RULES = VerifyRules()
_VERIFY_AT_LEAST_S = 10.0
_VERIFY_TIMES = 5.0


@dataclass(frozen=True)
class AttackResult:
    """What one attack on one task came to. ``error`` says why there is no verdict at all, such as a lost sandbox."""

    attack: Attack
    task_id: str
    verdict: Verdict | None
    seconds: float
    error: str = ""

    @property
    def got_through(self) -> bool:
        """The policy was paid: any reward above what an untouched task gives, which is 0."""
        return self.verdict is not None and bool(self.verdict.raw_reward)

    def as_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints for it."""
        verdict = self.verdict
        return {
            "attack": self.attack.name,
            "group": str(self.attack.group),
            "task": self.task_id,
            "got_through": self.got_through,
            "outcome": None if verdict is None else str(verdict.outcome),
            "reward": None if verdict is None else verdict.reward,
            "cause": None if verdict is None or verdict.cause is None else str(verdict.cause),
            "detail": self.error or ("" if verdict is None else verdict.detail),
            "exit_code": None if verdict is None else verdict.exit_code,
            "signals": {} if verdict is None else verdict.signals,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class TaskProof:
    """One task under the whole suite.

    Attributes:
        nop: the untouched task's verdict; it must be 0.
        oracle: the verdict of the task's own solution, which must be 1; ``None`` where it has none.
        results: one for each attack; empty if the task is not fit to be attacked.
        error: why the task could not be tried at all.
    """

    task_id: str
    nop: Verdict | None = None
    oracle: Verdict | None = None
    results: list[AttackResult] = field(default_factory=list)
    error: str = ""

    @property
    def unfit(self) -> str:
        """Why what the attacks give would say nothing about this task, or an empty text."""
        if self.error:
            return self.error
        if self.nop is None or self.nop.outcome is not Outcome.FAILED:
            found = "was not tried" if self.nop is None else f"gives {self.nop.outcome} ({self.nop.detail})"
            return f"the untouched task {found}, not 0"
        if self.oracle is not None and self.oracle.outcome is not Outcome.PASSED:
            return f"its own solution gives {self.oracle.outcome} ({self.oracle.detail or self.oracle.cause}), not 1"
        return ""

    @property
    def through(self) -> list[AttackResult]:
        """The attacks that were paid."""
        return [result for result in self.results if result.got_through]


async def prove(
    tasks: Mapping[str, Task],
    provider: SandboxProvider,
    attacks: Sequence[Attack],
    *,
    rules: VerifyRules = _RULES,
    slots: int = 4,
    verify_s: float | None = None,
    then_solve: bool = False,
    told: Callable[[TaskProof, AttackResult | None], None] = lambda *_: None,
) -> list[TaskProof]:
    """Run every attack against every task, at most ``slots`` sandboxes at once.

    Each task is first verified untouched (it must give 0) and after its own solution (1); one where that fails is not
    attacked.

    Args:
        verify_s: seconds that the tests may take under attack; ``None`` for five times what they took on the
            untouched task, at least ten seconds and at most the task's own budget.
        then_solve: each attack is followed by the task's own solution, which must then give 1: what is looked for
            are false alarms. Attacks that spoil the sandbox are left out.
        told: called as soon as a task has been tried (with ``None``), and after each attack.
    """
    factory = LocalEnvironmentFactory(tasks, provider, rules=rules)
    free = asyncio.Semaphore(slots)
    proofs = {task_id: TaskProof(task_id) for task_id in tasks}

    async def one(task: Task, attack: Attack, budget: float) -> None:
        proof = proofs[task.id]
        async with free:
            result = await _attacked(factory, task, attack, budget, then_solve=then_solve)
        proof.results.append(result)
        told(proof, result)

    async def every(task: Task) -> None:
        proof = proofs[task.id]
        async with free:
            await _try(factory, task, proof)
        told(proof, None)
        if proof.unfit or proof.nop is None:
            return
        budget = verify_s or min(task.verifier_timeout_s, max(_VERIFY_AT_LEAST_S, _VERIFY_TIMES * proof.nop.duration_s))
        tried = [attack for attack in attacks if not (then_solve and attack.spoils)]
        await asyncio.gather(*(one(task, attack, budget) for attack in tried))
        order = {attack.name: number for number, attack in enumerate(attacks)}
        proof.results.sort(key=lambda result: order[result.attack.name])

    await asyncio.gather(*map(every, tasks.values()))
    return list(proofs.values())


async def _try(factory: LocalEnvironmentFactory, task: Task, proof: TaskProof) -> None:
    try:
        proof.nop = await _verdict(factory, task, ())
        if task.solution is not None:
            proof.oracle = await _verdict(factory, task, (), solve=True)
    except TermrlError as error:
        proof.error = error.message


async def _attacked(
    factory: LocalEnvironmentFactory, task: Task, attack: Attack, budget: float, *, then_solve: bool
) -> AttackResult:
    started = time.monotonic()
    verdict, why = None, ""
    verify_s = min(budget, HANG_S) if attack.hangs else budget
    try:
        verdict = await _verdict(factory, task, attack.turns, solve=then_solve, verify_s=verify_s)
    except TermrlError as error:
        why = error.message
    return AttackResult(attack, task.id, verdict, time.monotonic() - started, why)


async def _verdict(
    factory: LocalEnvironmentFactory,
    task: Task,
    turns: Sequence[str],
    *,
    solve: bool = False,
    verify_s: float | None = None,
) -> Verdict:
    environment = factory.create()
    try:
        await environment.reset(task.id)
        for turn in turns:
            await environment.step(Action(command=turn, wait_seconds=TURN_S))
        if solve:
            await solve_in(environment, task)
        observation = await environment.step(Action(action_type="evaluate", wait_seconds=verify_s))
        return Verdict.model_validate(observation.info["verdict"])
    finally:
        await environment.close()


async def solve_in(environment: Environment, task: Task) -> None:
    """Do what the task's own ``solution/solve.sh`` does, as a policy would: by actions of the environment.

    Raises:
        TaskError: ``[solution] env`` names a host variable that is not set.
    """
    assert task.solution is not None
    left_out = excluded_paths(task.solution)
    for name, path in entries(task.solution):
        if path.is_file() and str(name) not in left_out:
            content = path.read_bytes().decode("utf-8", "surrogateescape")
            target = posixpath.join(SOLUTION, str(name))
            await environment.step(Action(action_type="write_file", file_path=target, content=content))
    env = resolve_env(task.solution_env, f"{task.path}/task.toml: solution.env")
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
    budget = task.agent_timeout_s or DEFAULT_SOLUTION_TIMEOUT_S
    await environment.step(Action(command=f"{exports}bash {SOLUTION}/solve.sh", wait_seconds=budget))
