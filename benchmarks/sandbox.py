"""Sandboxes: start, command and throughput, against plain bubblewrap and plain bash on the host.

Peers, measured in the same run: ``bwrap … true`` (all namespaces, the host's files read-only, no resident, no limits)
for start and end; ``bash -c true`` started by asyncio on the bare host for commands.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._report import Figure, report
from termrl.sandboxes.base import Sandbox, SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider
from termrl.sandboxes.host import find_bwrap

_SPEC = SandboxSpec("bench", host_userland=True)
_AT_ONCE = 16


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


def _memory_mb(provider: BubblewrapProvider) -> float:
    """Proportional set size of everything that belongs to the provider's sandboxes, in MiB each."""
    total = 0
    for pid in provider.processes():
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024 / provider.live


async def measure(rounds: int) -> list[Figure]:
    """Measure everything with ``rounds`` repetitions."""
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
        memory = _memory_mb(provider)
    return [
        Figure("sandbox_create_destroy", start, "ms", "≤ 45 ms", start <= 45, plain, start / plain),
        Figure("sandbox_exec", exec_ms, "ms", "≤ 4 ms", exec_ms <= 4, bash, exec_ms / bash),
        Figure("sandbox_exec_rate_16", rate, "exec/s", "≥ 300/s", rate >= 300, bash_rate, rate / bash_rate),
        Figure("sandbox_memory", memory, "MiB", "≤ 8 MiB", memory <= 8),
    ]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    report("Sandboxes", asyncio.run(measure(arguments.rounds)), as_json=arguments.json)


if __name__ == "__main__":
    main()
