"""Sandboxes over a long time: 10,000 commands on one, 2,000 in a row; memory, descriptors and threads must stay flat.

Both are measured after a warm-up and at the end, of this process and of everything that belongs to the provider. The
peer of each figure is its value before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks._report import Figure, report
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider

_SPEC = SandboxSpec("soak", host_userland=True, memory_mb=256, storage_mb=64)
_GROWTH = 0.05
_AT_ONCE = 4
# What a command may be: quiet, loud, failing, timed out, with a daemon that is killed at once.
_COMMANDS = ("true", "seq 2000", "exit 3", "ls -l /usr/bin | tail -3", "sleep 9 & kill $!")


@dataclass(frozen=True)
class Use:
    """What this process and the provider's processes use together: MiB resident, descriptors, threads, processes."""

    rss_mb: float
    fds: int
    threads: int
    processes: int


def use_now(provider: BubblewrapProvider) -> Use:
    """Look at this process, the launcher, bubblewrap and the residents."""
    gc.collect()
    pids = [os.getpid(), *provider.processes()]
    rss = fds = threads = 0
    for pid in pids:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rss += int(status["VmRSS"].split()[0])
        threads += int(status["Threads"])
        fds += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Use(rss / 1024, fds, threads, len(pids))


async def _repeat(action: Callable[[int], Awaitable[object]], count: int) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await action(number)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))


async def soak(
    name: str, provider: BubblewrapProvider, action: Callable[[int], Awaitable[object]], count: int
) -> list[Figure]:
    """Do ``action`` a tenth of ``count`` times, look, do it ``count`` times, and look again."""
    await _repeat(action, max(count // 10, _AT_ONCE))
    before = use_now(provider)
    begin = time.perf_counter()
    await _repeat(action, count)
    seconds = time.perf_counter() - begin
    after = use_now(provider)
    print(f"{name}: {count} in {seconds:.1f} s; before {before}, after {after}", file=sys.stderr)
    growth = after.rss_mb / before.rss_mb - 1
    figures = [
        Figure(f"{name}_rss", after.rss_mb, "MiB", "≤ 5 % growth", growth <= _GROWTH, before.rss_mb, 1 + growth),
    ]
    for what in ("fds", "threads", "processes"):
        old, new = getattr(before, what), getattr(after, what)
        figures.append(Figure(f"{name}_{what}", new, "", "no growth", new <= old, old, new / old))
    return figures


async def measure(execs: int, sandboxes: int) -> list[Figure]:
    """Both soaks."""
    # The event loop's pool of threads grows to its size with use; let it be that from the start.
    pool = min(32, (os.cpu_count() or 1) + 4)
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(pool)))
    async with BubblewrapProvider() as provider:
        sandbox = await provider.create(_SPEC)

        async def command(number: int) -> None:
            # One in 500 meets its timeout.
            slow = number % 500 == 499
            text = "setsid sleep 99 & sleep 99" if slow else _COMMANDS[number % len(_COMMANDS)]
            await sandbox.exec(text, timeout_s=0.1 if slow else 60)

        async def one(_: int) -> None:
            made = await provider.create(_SPEC)
            await made.exec("setsid sleep 99 >/dev/null 2>&1 & echo a > /tmp/a", timeout_s=60)
            await made.stop()

        figures = await soak("soak_execs", provider, command, execs)
        left = await sandbox.exec("cat /proc/[0-9]*/comm | grep -c sleep", timeout_s=60)
        figures.append(Figure("soak_execs_left_running", int(left.output), "processes", "0", int(left.output) == 0))
        await sandbox.stop()
        figures += await soak("soak_sandboxes", provider, one, sandboxes)
        remains = provider.remains()
        figures.append(Figure("soak_remains", len(remains), "things", "0", not remains))
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--execs", type=int, default=10_000)
    parser.add_argument("--sandboxes", type=int, default=2_000)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.execs, arguments.sandboxes))
    report("Sandboxes over a long time", figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
