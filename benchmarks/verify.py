"""Verifying: what it costs over test.sh run bare, which attacks score, which honest solutions are zeroed.

On each backend that works here. Every family of first-steps is solved by its own solution, and tasks of some families
are attacked in every way, through environment, verifier and attribution as in training. The peer of the cost is the
same test.sh run bare in the same sandbox: on bubblewrap as one command, on Docker as one exec of the SDK.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # In the place of this folder, whose docker.py would come before the SDK.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks._report import Figure, report
from termrl.attacks import ATTACKS, prove
from termrl.errors import TermrlError
from termrl.sandboxes import open_provider
from termrl.sandboxes.base import Sandbox, SandboxProvider
from termrl.tasks.generate import FAMILIES, generate
from termrl.tasks.task import Task
from termrl.tasks.taskset import TaskSet
from termrl.verifier.oracle import run_solution
from termrl.verifier.tamper import take_baseline
from termrl.verifier.verdict import Outcome
from termrl.verifier.verify import verify

IMAGE = "termrl-test/base:bookworm"
BARS_MS = {"bubblewrap": 50.0, "docker": 400.0}

_SETTINGS: Mapping[str, dict[str, Any]] = {
    "bubblewrap": {},
    "docker": {"images": {"aliases": {"debian:12-slim": IMAGE}}},
}
_ATTACKED = {"bubblewrap": 3, "docker": 1}
_ROUNDS = {"bubblewrap": 30, "docker": 8}


async def _bare_ms(provider: SandboxProvider, sandbox: Sandbox) -> float:
    """Milliseconds of test.sh alone; the tests are at /opt/bare."""
    await sandbox.exec("mkdir -p /logs/verifier", timeout_s=5, cwd="/")
    if provider.name != "docker":
        begin = time.perf_counter()
        await sandbox.exec("bash /opt/bare/test.sh", timeout_s=30, clean_env=True)
        return (time.perf_counter() - begin) * 1e3
    import docker

    client = docker.from_env()
    try:
        container = await asyncio.to_thread(client.containers.get, sandbox.id)
        begin = time.perf_counter()
        await asyncio.to_thread(container.exec_run, ["bash", "/opt/bare/test.sh"], workdir=sandbox.workdir)
        return (time.perf_counter() - begin) * 1e3
    finally:
        client.close()


async def _cost_ms(provider: SandboxProvider, task: Task, rounds: int) -> tuple[float, float]:
    """(median milliseconds of a whole verify, of test.sh alone), both in a new, solved sandbox each time."""
    whole: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        sandbox = await provider.create(task.resolved_sandbox())
        try:
            baseline = await take_baseline(sandbox, task)
            await run_solution(sandbox, task)
            begin = time.perf_counter()
            verdict = await verify(sandbox, task, baseline=baseline)
            whole.append((time.perf_counter() - begin) * 1e3)
            if verdict.outcome is not Outcome.PASSED:
                raise SystemExit(f"the solution of {task.id} does not pass: {verdict}")
            await sandbox.put(task.tests, "/opt/bare")
            bare.append(await _bare_ms(provider, sandbox))
        finally:
            await sandbox.stop()
    return statistics.median(whole), statistics.median(bare)


async def measure(backend: str, tasks: TaskSet, rounds: int | None) -> list[Figure]:
    """The figures of one backend."""
    async with open_provider(backend, **_SETTINGS[backend]) as provider:
        solved = await prove(tasks, provider, (), slots=4)
        step = -(-len(tasks) // _ATTACKED[backend])
        some = dict(islice(tasks.items(), 0, None, step))
        attacked = await prove(some, provider, ATTACKS, slots=4, verify_s=5.0)
        whole, bare = await _cost_ms(provider, next(iter(tasks.values())), rounds or _ROUNDS[backend])
    through = [f"{result.task_id}: {result.attack.name}" for proof in attacked for result in proof.through]
    zeroed = [f"{proof.task_id}: {proof.unfit}" for proof in (*solved, *attacked) if proof.unfit]
    flagged = [proof.task_id for proof in solved if proof.oracle is not None and proof.oracle.signals]
    for line in (*through, *zeroed):
        print(line, file=sys.stderr)
    tried, extra, bar = sum(len(proof.results) for proof in attacked), whole - bare, BARS_MS[backend]
    return [
        Figure(f"{backend}_attacks_tried", tried, f"({len(ATTACKS)} × {len(attacked)} families)", "", True),
        Figure(f"{backend}_attacks_that_score", len(through), "", "0", not through),
        Figure(f"{backend}_honest_solutions_zeroed", len(zeroed), f"of {len(solved)}", "0", not zeroed),
        Figure(f"{backend}_honest_solutions_with_a_signal", len(flagged), f"of {len(solved)}", "0", not flagged),
        Figure(f"{backend}_verify_overhead", extra, "ms", f"≤ {bar:g} ms", extra <= bar, bare, whole / bare),
    ]


async def _all(backends: Sequence[str], rounds: int | None) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder, "tasks"), families=list(FAMILIES), per_family=1)
        tasks = TaskSet.load(Path(folder, "tasks"))
        for backend in backends:
            try:
                figures += await measure(backend, tasks, rounds)
            except TermrlError as error:
                print(f"{backend}: not measured: {error.message}", file=sys.stderr)
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sandbox", action="append", choices=list(_SETTINGS))
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    figures = asyncio.run(_all(arguments.sandbox or list(_SETTINGS), arguments.rounds))
    report("Verifying", figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
