"""The agent function of miles: what it adds to policy and environment, many episodes at once, faults, and abort.

The policy is a session server in a process of its own that answers at once; sandboxes are bubblewrap's, the shared
server is ``termrl serve``. The peer of the overhead is the time that the episodes themselves account for: generation,
commands, reset and tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import termrl.sandboxes  # noqa: E402
from benchmarks._report import Figure, report  # noqa: E402
from termrl.integrations.miles import abort, log_rollout, reward_func, run  # noqa: E402
from termrl.integrations.miles.report import TALLY  # noqa: E402
from termrl.sandboxes import SandboxProvider, open_provider  # noqa: E402
from tests.endtoend.faults import faulty  # noqa: E402
from tests.endtoend.served import served  # noqa: E402
from tests.endtoend.tiny import write_tasks  # noqa: E402
from tests.environment.client.conftest import settled  # noqa: E402
from tests.integrations.miles.fakemiles import Sample, check_no_aborted  # noqa: E402
from tests.integrations.miles.instant import instant  # noqa: E402
from tests.integrations.miles.proxy import lossy  # noqa: E402

_MAKE, _MISS, _LOOK, _DONE = "```bash\nmkdir apple\n```", "```bash\ntouch x\n```", "```bash\nls\n```", "TASK_COMPLETE"
_PROMPT = [{"role": "system", "content": "You solve tasks."}]
_OFFLINE = (
    "curl -fsS https://localhost:9/install.sh | sh || { echo 'curl: (6) Could not resolve host: pypi'; exit 1; }\n"
)
_GROUP = 8
_MIB = 1024.0


@contextlib.contextmanager
def _variables(**variables: str) -> Iterator[None]:
    """Set variables, and unset every other setting of the agent function."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("OPENENV_", "MILES_"))}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(kept)


def _local(folder: Path) -> dict[str, str]:
    return {"OPENENV_SANDBOX_BACKEND": "bubblewrap", "OPENENV_TB2_TASKS_DIR": str(folder / "tasks")}


async def _play(url: str, count: int, task: str = "make-apple") -> list[dict[str, Any]]:
    calls = (run(base_url=f"{url}/sessions/{n}", prompt=_PROMPT, metadata={"task_id": task}) for n in range(count))
    return list(await asyncio.gather(*calls))


async def overhead(folder: Path, episodes: int) -> list[Figure]:
    """One episode after the other, of ten turns each: wall clock over what the episode accounts for."""
    with instant(*([_LOOK] * 9), _DONE) as url, _variables(**_local(folder)):
        async with _kept_open(url):
            await _play(url, 1)
            spent = accounted = turns = 0.0
            for _ in range(episodes):
                begin = time.perf_counter()
                (result,) = await _play(url, 1)
                spent += time.perf_counter() - begin
                metrics = result["agent_metrics"]
                accounted += metrics["total_gen_time"] + metrics["total_tool_time"]
                turns += metrics["turns"]
    milliseconds = 1000 * (spent - accounted) / turns
    ratio = spent / accounted
    return [
        Figure(
            "agent_overhead", milliseconds, "ms a turn", "≤ 2 ms", milliseconds <= 2, 1000 * accounted / turns, ratio
        )
    ]


@contextlib.asynccontextmanager
async def _kept_open(url: str) -> AsyncIterator[None]:
    """What episodes share stays open in between, as while a rollout has others running."""
    from termrl.integrations.miles.parts import shared_parts

    async with shared_parts() as parts:
        await parts.client(f"{url}/v1", timeout_s=60)
        yield


async def at_once(folder: Path, count: int) -> list[Figure]:
    """``count`` episodes at once, twice after a warm-up: failures, memory an episode, descriptors."""
    with (
        instant(_LOOK, _MAKE, _DONE) as url,
        served(folder / "tasks", arguments=_room(count)) as server,
        _variables(OPENENV_ENV_URL=server.url),
    ):
        await _play(url, 16)
        peaks, fds, failures, seconds = [], [], 0, 0.0
        for _ in range(3):
            gc.collect()
            before, watch = _rss_mb(), _Watch()
            watching = asyncio.ensure_future(watch.run())
            begin = time.perf_counter()
            results = await _play(url, count)
            seconds = time.perf_counter() - begin
            watching.cancel()
            peaks.append((watch.peak - before) / count)
            failures += sum(result["reward"] != 1.0 for result in results)
            fds.append(_descriptors())
    worst = max(peaks)
    return [
        Figure("at_once_failures", failures, f"of {3 * count}", "0", failures == 0),
        Figure("at_once_memory", worst, "MiB an episode", "≤ 1", worst <= 1),
        Figure("at_once_fds", fds[-1], "after the last", "as after the first", fds[-1] <= fds[0], fds[0]),
        Figure("at_once_rate", count / seconds, "episodes/s", "", True),
    ]


def _room(count: int) -> tuple[str, ...]:
    return ("--max-sessions", str(count), "--max-memory-mb", "100000000")


class _Watch:
    def __init__(self) -> None:
        self.peak = _rss_mb()

    async def run(self) -> None:
        while True:
            self.peak = max(self.peak, _rss_mb())
            await asyncio.sleep(0.05)


def _rss_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / _MIB


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def faults(folder: Path, episodes: int, rate: float, seed: int) -> list[Figure]:
    """Episodes with faults, half of whose policies solve the task: what became of each, as miles would have it."""
    TALLY.take()
    injected: Counter[str] = Counter()
    samples: list[Sample] = []
    half = episodes // 2
    for place, replies in enumerate(((_LOOK, _MAKE, _DONE), (_LOOK, _MISS, _DONE))):
        with instant(*replies) as url:
            count = half // 2
            made: list[Any] = []
            with _patched(faulty(rate, seed + place, made)), _variables(**_local(folder)):
                samples += await _samples(url, count, wanted=1.0 - place)
            injected.update({str(cause): number for cause, number in made[0].injected.items()})
            with _variables(**_local(folder)):
                samples += await _samples(url, offline := half // 20, wanted=1.0 - place, task="offline-apple")
            injected["bootstrap_failed"] += offline
            with served(folder / "tasks", arguments=_room(48)) as server:
                async with lossy(server.url, rate=rate, rng=random.Random(seed + place)) as proxy:
                    settings = folder / "agent.toml"
                    settings.write_text("retry_wait_s = 0.01\n[environment]\ncapacity_wait_s = 0\n")
                    with _variables(OPENENV_ENV_URL=proxy.url, OPENENV_CONFIG=str(settings)):
                        samples += await _samples(url, half - count - offline, wanted=1.0 - place)
                    injected.update(proxy.injected)
    mistaken = sum(sample.reward is not None and sample.reward != sample.metadata["wanted"] for sample in samples)
    undropped = sum((sample.reward is None) != (sample.status is Sample.Status.ABORTED) for sample in samples)
    policy = [sample.reward for sample in samples if sample.metadata["wanted"] == 0.0 and sample.reward is not None]
    groups = [samples[at : at + _GROUP] for at in range(0, len(samples), _GROUP)]
    lost = sum(not check_no_aborted(None, group)[0] for group in groups)
    metrics: dict[str, Any] = {"rollout/dynamic_filter/drop_group_has_aborted": lost}
    log_rollout(0, None, [], metrics, 1.0)
    counted = sum(number for name, number in metrics.items() if name.startswith(("agent/dropped", "agent/retried")))
    dropped = sum(sample.reward is None for sample in samples)
    total = injected.total()
    return [
        Figure("faults_injected", total, f"in {len(samples)} episodes", "about 0.2", 0.1 < total / len(samples) < 0.4),
        Figure("faults_counted", counted, "dropped or retried", "all", counted == total, total, counted / total),
        Figure("faults_dropped", dropped, "episodes", "≤ injected", 0 < dropped <= total),
        Figure("faults_mistaken", mistaken, "rewards", "0", mistaken == 0),
        Figure("faults_not_aborted", undropped, "samples", "0", undropped == 0),
        Figure("faults_policy_failures", sum(policy), "sum of their rewards", "0", bool(policy) and not any(policy)),
        Figure("faults_groups_lost", lost, f"of {len(groups)}", "counted", metrics["agent/groups_lost"] == lost),
    ]


async def _samples(url: str, count: int, *, wanted: float, task: str = "make-apple") -> list[Sample]:
    slots = asyncio.Semaphore(32)

    async def one(number: int) -> Sample:
        async with slots:
            result = await run(base_url=f"{url}/sessions/{number}", prompt=_PROMPT, metadata={"task_id": task})
        metadata = {"wanted": wanted, **result}
        sample = Sample(0, number, [], metadata, status=Sample.Status.COMPLETED)
        reward = await reward_func(SimpleNamespace(), sample)
        sample.reward = reward if not isinstance(reward, list) else None
        return sample

    return list(await asyncio.gather(*map(one, range(count))))


@contextlib.contextmanager
def _patched(opener: Callable[..., SandboxProvider]) -> Iterator[None]:
    before, termrl.sandboxes.open_provider = termrl.sandboxes.open_provider, opener
    try:
        yield
    finally:
        termrl.sandboxes.open_provider = before


async def cancelled(folder: Path, count: int) -> list[Figure]:
    """``count`` running episodes are aborted: seconds until no sandbox is left."""
    made: list[SandboxProvider] = []

    def opener(name: str, **settings: Any) -> SandboxProvider:
        made.append(open_provider(name, **settings))
        return made[-1]

    with instant("```bash\nsleep 600\n```") as url, _patched(opener), _variables(**_local(folder)):
        playing = asyncio.ensure_future(_play(url, count))
        assert await settled(lambda: bool(made) and made[0].live == count, 120)
        await asyncio.sleep(1.0)
        begin = time.perf_counter()
        await abort(None)
        seconds = time.perf_counter() - begin
        left = made[0].live
        results = await playing
    rewarded = sum(result["reward"] is not None for result in results)
    return [
        Figure("abort", seconds, f"s for {count}", "≤ 10 s", seconds <= 10),
        Figure("abort_left", left, "sandboxes", "0", left == 0),
        Figure("abort_rewarded", rewarded, "episodes", "0", rewarded == 0),
    ]


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """Run those that are asked for."""
    with tempfile.TemporaryDirectory(prefix="termrl-miles-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_tasks(folder / "tasks", ("apple",))
        write_tasks(folder / "tasks", ("apple",), prefix="offline", test=_OFFLINE)
        parts = {
            "overhead": lambda: overhead(folder, arguments.episodes),
            "at-once": lambda: at_once(folder, arguments.at_once),
            "faults": lambda: faults(folder, arguments.faults, arguments.rate, arguments.seed),
            "abort": lambda: cancelled(folder, arguments.at_once),
        }
        return [figure for name in arguments.only or parts for figure in asyncio.run(parts[name]())]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", choices=["overhead", "at-once", "faults", "abort"], help="these parts")
    parser.add_argument("--episodes", type=int, default=20, help="for the overhead")
    parser.add_argument("--at-once", type=int, default=256, help="episodes at once, and to abort")
    parser.add_argument("--faults", type=int, default=500, help="episodes with faults")
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    report("miles' agent function", measure(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
