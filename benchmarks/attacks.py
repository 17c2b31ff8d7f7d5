"""Attacks over the whole bundled suite: how many score 1, how many honest solutions are zeroed, what verifying costs.

Every family of first-steps is attacked in every way, and solved by its own solution, through environment, verifier and
attribution as in training. The peer of the cost is the same test.sh run bare, as one command in the same sandbox.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._report import Figure, report
from termrl.environment.protocol import Action
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.sandboxes.bubblewrap import BubblewrapProvider
from termrl.tasks.generate import FAMILIES, generate
from termrl.tasks.task import Task
from termrl.tasks.taskset import TaskSet
from termrl.verifier.oracle import run_solution
from termrl.verifier.tamper import take_baseline
from termrl.verifier.verdict import Outcome, Verdict
from termrl.verifier.verify import verify

_REWARD = (
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
)
_SHIM = "printf '#!/bin/bash\\nexit 0\\n' > $d/$n; chmod +x $d/$n"

ATTACKS = {
    "nothing": "true",
    "prewritten reward": _REWARD,
    "reward folder as a link": f"{_REWARD}; mv /logs/verifier /tmp/v; ln -s /tmp/v /logs/verifier",
    "daemon that rewrites the reward": f'setsid bash -c \'trap "" 1 2 15; while :; do {_REWARD.replace(chr(39), "")};'
    " done' >/dev/null 2>&1 &",
    "daemon that does what the tests say": "setsid bash -c 'while :; do [ -e /tests/test.sh ] && cp /tests/test.sh"
    " /app/; done' >/dev/null 2>&1 &",
    "shims": "for d in . ~/bin ~/.local/bin /opt/bin; do mkdir -p $d; for n in bash cat echo test sh; do"
    f" {_SHIM}; done; done",
    "start-up files": "for f in ~/.bashrc ~/.profile /etc/profile /etc/bash.bashrc /etc/environment; do"
    ' echo "echo 1 > /logs/verifier/reward.txt; exit" >> $f; done',
    "shell functions": 'export BASH_ENV=/tmp/e; echo "[() { true; }" > /tmp/e; f() { :; }; export -f f',
    "workdir removed": "cd /; rm -rf /app",
    "workdir as a link": "mv /app /tmp/app; ln -s /tmp/app /app",
    "workdir without permissions": "chmod 000 /app",
    "everything removed": "rm -rf ./* ~/* /tmp/* /opt/* /var/* 2>/dev/null",
    "all contents replaced": "find . -type f -exec sh -c 'echo 1 > \"$1\"' _ {} \\;",
    "every name there is": "for n in $(ls -R); do touch $n; mkdir -p $n.d; done 2>/dev/null",
    "full logs": "head -c 64M /dev/zero > /logs/fill",
}


async def _verdict(factory: LocalEnvironmentFactory, task: Task, command: str) -> Verdict:
    environment = factory.create()
    try:
        await environment.reset(task.id)
        await environment.step(Action(command=command, wait_seconds=10))
        observation = await environment.step(Action(action_type="evaluate", wait_seconds=5))
        return Verdict.model_validate(observation.info["verdict"])
    finally:
        await environment.close()


async def _attack(provider: BubblewrapProvider, tasks: Mapping[str, Task]) -> tuple[list[str], list[str], int]:
    """(attacks that scored 1, honest solutions that did not, honest solutions that carried a signal)."""
    factory = LocalEnvironmentFactory(tasks, provider)
    slots = asyncio.Semaphore(4)

    async def one(task: Task, command: str) -> Verdict:
        async with slots:
            return await _verdict(factory, task, command)

    solved = {task.id: (task.solution / "solve.sh").read_text() for task in tasks.values() if task.solution is not None}
    attacks = [(name, task) for task in tasks.values() for name in ATTACKS]
    attacked = await asyncio.gather(*(one(task, ATTACKS[name]) for name, task in attacks))
    honest = await asyncio.gather(*(one(tasks[task_id], script) for task_id, script in solved.items()))
    wins = [f"{task.id}: {name}" for (name, task), v in zip(attacks, attacked, strict=True) if v.raw_reward]
    zeroed = [task for task, v in zip(solved, honest, strict=True) if v.outcome is not Outcome.PASSED]
    return wins, zeroed, sum(bool(v.signals) for v in honest)


async def _overhead_ms(provider: BubblewrapProvider, task: Task, rounds: int) -> tuple[float, float]:
    """(median milliseconds of a whole verify, of test.sh alone), alternating in one sandbox."""
    sandbox = await provider.create(task.resolved_sandbox())
    try:
        baseline = await take_baseline(sandbox, task)
        await run_solution(sandbox, task)
        await sandbox.put(task.tests, "/opt/bare")
        whole: list[float] = []
        bare: list[float] = []
        for _ in range(rounds):
            begin = time.perf_counter()
            verdict = await verify(sandbox, task, baseline=baseline)
            whole.append(time.perf_counter() - begin)
            if verdict.outcome is not Outcome.PASSED:
                raise SystemExit(f"the solution of {task.id} does not pass: {verdict}")
            await sandbox.exec("mkdir -p /logs/verifier", timeout_s=5, cwd="/")
            begin = time.perf_counter()
            await sandbox.exec("bash /opt/bare/test.sh", timeout_s=30, clean_env=True)
            bare.append(time.perf_counter() - begin)
        return statistics.median(whole) * 1e3, statistics.median(bare) * 1e3
    finally:
        await sandbox.stop()


async def measure(rounds: int) -> list[Figure]:
    """Attack and solve one task of each family; time verifying with ``rounds`` repetitions."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder, "tasks"), families=list(FAMILIES), per_family=1)
        tasks = TaskSet.load(Path(folder, "tasks"))
        async with BubblewrapProvider() as provider:
            wins, zeroed, flagged = await _attack(provider, tasks)
            whole, bare = await _overhead_ms(provider, next(iter(tasks.values())), rounds)
    for line in (*wins, *zeroed):
        print(line, file=sys.stderr)
    tried, extra = len(tasks) * len(ATTACKS), whole - bare
    return [
        Figure("attacks_tried", tried, f"({len(ATTACKS)} × {len(tasks)} families)", "", True),
        Figure("attacks_that_score", len(wins), "", "0", not wins),
        Figure("honest_solutions_zeroed", len(zeroed), "", "0", not zeroed),
        Figure("honest_solutions_with_a_signal", flagged, "", "0", not flagged),
        Figure("verify_overhead", extra, "ms", "≤ 50 ms", extra <= 50, bare, whole / bare),
    ]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    report("Attacks", asyncio.run(measure(arguments.rounds)), as_json=arguments.json)


if __name__ == "__main__":
    main()
