"""Sandboxes: start, command, throughput, memory and verification, against plain bubblewrap and the bare host.

Peers, measured in the same run: ``bwrap … true`` (all namespaces, the host's files read-only, no resident, no limits)
for start and end; ``bash -c true`` started by asyncio on the bare host for commands; ``bash tests/test.sh`` of the
same task, already in place in a sandbox, for verification. Memory is Σ PSS of the launcher, bubblewrap, the residents
and what this process itself grew by, beside Σ of what is private to each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks._report import Figure, report
from termrl.sandboxes.base import Sandbox, SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider
from termrl.sandboxes.host import find_bwrap

if TYPE_CHECKING:
    from termrl.tasks.task import Task

_SPEC = SandboxSpec("bench", host_userland=True)
_AT_ONCE = 16
_MEMORY_BAR_MB = 1200


async def _median_ms(action: Callable[[], Awaitable[object]], count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        await action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


async def _per_second(workers: list[Callable[[], Awaitable[object]]], count: int) -> float:
    async def work(action: Callable[[], Awaitable[object]]) -> None:
        for _ in range(count):
            await action()

    begin = time.perf_counter()
    await asyncio.gather(*(work(action) for action in workers))
    return len(workers) * count / (time.perf_counter() - begin)


async def _host_bash() -> None:
    process = await asyncio.create_subprocess_exec("bash", "-c", "true", stdout=asyncio.subprocess.PIPE)
    await process.communicate()


async def _plain_bwrap() -> None:
    arguments = [
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "true",
    ]
    process = await asyncio.create_subprocess_exec(find_bwrap()[0], *arguments)
    if await process.wait() != 0:
        raise SystemExit("plain bwrap failed")


def _true_in(sandbox: Sandbox) -> Callable[[], Awaitable[object]]:
    return lambda: sandbox.exec("true", timeout_s=20)


def _memory_mb(pids: Sequence[int], *kinds: str) -> float:
    """MiB of some processes together: ``Pss``, or ``Private_Clean`` and ``Private_Dirty``."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.partition(":")[0] in kinds)
    return total / 1024


async def _many(provider: BubblewrapProvider, count: int) -> list[Figure]:
    """Memory of ``count`` live sandboxes that have each run a command."""
    before = _memory_mb([os.getpid()], "Pss")
    begin = time.perf_counter()
    sandboxes = []
    for start in range(0, count, _AT_ONCE):
        part = range(start, min(start + _AT_ONCE, count))
        sandboxes += await asyncio.gather(*(provider.create(_SPEC) for _ in part))
    created = time.perf_counter() - begin
    await asyncio.gather(*(sandbox.exec("true", timeout_s=60) for sandbox in sandboxes))
    pids = provider.processes()
    grown = _memory_mb([os.getpid()], "Pss") - before
    total = _memory_mb(pids, "Pss") + grown
    private = _memory_mb(pids, "Private_Clean", "Private_Dirty") + grown
    begin = time.perf_counter()
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    stopped = time.perf_counter() - begin
    print(f"{count} sandboxes: made in {created:.1f} s, ended in {stopped:.1f} s", file=sys.stderr)
    most = _MEMORY_BAR_MB / 200 * count
    return [
        Figure(
            f"sandbox_memory_{count}_live",
            total,
            "MiB (PSS)",
            f"≤ {most:g} MiB",
            total <= most,
            private,
            total / private,
        ),
        Figure("sandbox_memory", total / count, "MiB each", "≤ 6 MiB", total / count <= 6),
    ]


async def _verify_overhead(provider: BubblewrapProvider, rounds: int) -> Figure:
    """What :func:`verify` takes over ``test.sh`` run bare, on a bundled task solved in its sandbox."""
    from termrl.tasks.generate.suite import generate
    from termrl.tasks.taskset import TaskSet

    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder) / "suite", split="eval", per_family=1)
        tasks = list(TaskSet.load(Path(folder) / "suite").values())
        found = [await _verify_one(provider, task, rounds) for task in tasks]
    bare, ours = map(statistics.median, zip(*found, strict=True))
    over = statistics.median(ours - bare for bare, ours in found)
    return Figure("verify_overhead", over, "ms", "≤ 50 ms over test.sh", over <= 50, bare, ours / bare)


async def _verify_one(provider: BubblewrapProvider, task: Task, rounds: int) -> tuple[float, float]:
    """Milliseconds of a task's bare test.sh and of its whole verification, by turns in one solved sandbox."""
    from termrl.verifier.oracle import run_solution
    from termrl.verifier.verdict import Outcome
    from termrl.verifier.verify import verify

    sandbox = await provider.create(task.resolved_sandbox())
    bare, ours = [], []
    try:
        await run_solution(sandbox, task)
        for _ in range(rounds):
            await sandbox.open_verify_window(task.tests)
            begin = time.perf_counter()
            await sandbox.exec("bash /tests/test.sh", timeout_s=60)
            bare.append(time.perf_counter() - begin)
            await sandbox.close_verify_window()
            begin = time.perf_counter()
            verdict = await verify(sandbox, task)
            ours.append(time.perf_counter() - begin)
            if verdict.outcome is not Outcome.PASSED:
                raise SystemExit(f"{task.id}: the solved task scores {verdict}")
    finally:
        await sandbox.stop()
    return statistics.median(bare) * 1e3, statistics.median(ours) * 1e3


async def measure(rounds: int, live: int) -> list[Figure]:
    """Measure everything with ``rounds`` repetitions, memory with ``live`` sandboxes."""
    async with BubblewrapProvider() as provider:

        async def once() -> None:
            await (await provider.create(_SPEC)).stop()

        await once()
        plain = await _median_ms(_plain_bwrap, rounds)
        start = await _median_ms(once, rounds)
        sandboxes = await asyncio.gather(*(provider.create(_SPEC) for _ in range(_AT_ONCE)))
        bash = await _median_ms(_host_bash, rounds * 4)
        exec_ms = await _median_ms(_true_in(sandboxes[0]), rounds * 4)
        bash_rate = await _per_second([_host_bash] * _AT_ONCE, rounds)
        rate = await _per_second([_true_in(sandbox) for sandbox in sandboxes], rounds)
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
        verification = await _verify_overhead(provider, max(rounds // 8, 3))
        memory = await _many(provider, live)
    return [
        Figure("sandbox_create_destroy", start, "ms", "≤ 45 ms", start <= 45, plain, start / plain),
        Figure("sandbox_exec", exec_ms, "ms", "≤ 4 ms", exec_ms <= 4, bash, exec_ms / bash),
        Figure("sandbox_exec_rate_16", rate, "exec/s", "≥ 300/s", rate >= 300, bash_rate, rate / bash_rate),
        verification,
        *memory,
    ]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--live", type=int, default=200, help="sandboxes at once for the memory figure")
    arguments = parser.parse_args()
    report("Sandboxes", asyncio.run(measure(arguments.rounds, arguments.live)), as_json=arguments.json)


if __name__ == "__main__":
    main()
