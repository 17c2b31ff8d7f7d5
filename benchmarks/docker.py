"""Docker sandboxes: create and remove, commands one at a time and in 16 containers at once, and what a SIGKILL leaves.

Peers, measured in the same run through the SDK: ``containers.run(detach=True)`` of the same image with the same
network, then ``remove(force=True)``, for create and remove; ``exec_run`` of ``bash -c true`` in one container, and in
16 at once, for commands. Pairs are measured in turn, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # This script's own folder would put its name before the SDK's.
    sys.path[:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks._report import Figure, report
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.docker import reaper
from termrl.sandboxes.docker.provider import DockerProvider

_IMAGE = "termrl-test/base:bookworm"
_AT_ONCE = 16
_KILLED = 20
_CREATE_BAR = 1.15
_EXEC_BAR_MS = 15.0
_AT_ONCE_BAR = 100.0


async def _timed(action: Callable[[], Awaitable[object]]) -> float:
    begin = time.perf_counter()
    await action()
    return time.perf_counter() - begin


class _Bare:
    """The SDK, used as anyone would."""

    def __init__(self, provider: DockerProvider, image: str) -> None:
        import docker

        self._daemon = provider.daemon
        self._client = docker.from_env(max_pool_size=_AT_ONCE)
        self._image = image

    def start(self) -> Any:
        """A container as ``docker run -d`` makes it."""
        return self._client.containers.run(
            self._image, ["sleep", "600"], detach=True, network_mode="none", labels={"termrl-benchmark": "1"}
        )

    async def cycle(self) -> None:
        """Create and remove one."""
        container = await self._daemon.call(self.start)
        await self._daemon.call(container.remove, force=True)

    async def exec(self, container: Any) -> None:
        """One command by ``docker exec``."""
        await self._daemon.call(container.exec_run, ["bash", "-c", "true"])


async def _create(provider: DockerProvider, spec: SandboxSpec, bare: _Bare, rounds: int) -> Figure:
    async def cycle() -> None:
        await (await provider.create(spec)).stop()

    await cycle()
    await bare.cycle()
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(await _timed(cycle))
        theirs.append(await _timed(bare.cycle))
    value, peer = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
    ratio = value / peer
    bar = f"≤ {_CREATE_BAR} × docker run + rm"
    return Figure("create + remove", value, "ms", bar, ratio <= _CREATE_BAR, peer, ratio)


async def _single(provider: DockerProvider, spec: SandboxSpec, bare: _Bare, rounds: int) -> Figure:
    sandbox = await provider.create(spec)
    container = await provider.daemon.call(bare.start)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(await _timed(lambda: sandbox.exec("true", timeout_s=20)))
        theirs.append(await _timed(lambda: bare.exec(container)))
    await sandbox.stop()
    await provider.daemon.call(container.remove, force=True)
    value, peer = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
    return Figure("exec", value, "ms", f"≤ {_EXEC_BAR_MS:g} ms", value <= _EXEC_BAR_MS, peer, value / peer)


async def _at_once(provider: DockerProvider, spec: SandboxSpec, bare: _Bare, rounds: int) -> Figure:
    sandboxes = await asyncio.gather(*(provider.create(spec) for _ in range(_AT_ONCE)))

    async def work(action: Callable[[], Awaitable[object]], times: int) -> None:
        for _ in range(times):
            await action()

    async def rate(actions: list[Callable[[], Awaitable[object]]], times: int) -> float:
        return len(actions) * times / await _timed(lambda: asyncio.gather(*(work(one, times) for one in actions)))

    value = await rate([lambda one=one: one.exec("true", timeout_s=20) for one in sandboxes], rounds)
    await asyncio.gather(*(one.stop() for one in sandboxes))
    containers = [await provider.daemon.call(bare.start) for _ in range(_AT_ONCE)]
    peer = await rate([lambda one=one: bare.exec(one) for one in containers], max(1, rounds // 10))
    await asyncio.gather(*(provider.daemon.call(one.remove, force=True) for one in containers))
    bar = f"≥ {_AT_ONCE_BAR:g} per s"
    return Figure(f"exec, {_AT_ONCE} containers", value, "per s", bar, value >= _AT_ONCE_BAR, peer, value / peer)


def _killed(provider: DockerProvider, state: Path, image: str) -> list[Figure]:
    """SIGKILL a process with 20 containers and 40 daemons, sweep, and count what is left."""
    client = provider.daemon.client
    foreign = client.containers.run(image, ["sleep", "600"], detach=True, labels={"termrl-benchmark": "1"})
    facts = {
        "backend": "docker",
        "settings": {"state": str(state)},
        "spec": {"task_id": "benchmark", "image": image},
        "sandboxes": _KILLED,
        "daemons": 2,
        "seconds": "600",
    }
    owner = subprocess.Popen(
        [sys.executable, "-m", "termrl.sandboxes.conformance.owner", json.dumps(facts)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    up = owner.stdout.readline()
    theirs = {"label": f"termrl.pid={owner.pid}"}
    count = len(client.api.containers(filters=theirs))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    begin = time.perf_counter()
    reaper.sweep(client, state)
    took = time.perf_counter() - begin
    left = len(client.api.containers(all=True, filters=theirs)) + len(provider.remains())
    foreign.reload()
    spared = foreign.status == "running"
    foreign.remove(force=True)
    return [
        Figure(
            f"left of {_KILLED} containers",
            left,
            "containers",
            "0, foreign ones untouched",
            up == "up\n" and count == _KILLED and left == 0 and spared,
        ),
        Figure("sweep of them", took, "s", "", True),
    ]


async def _measure(image: str, rounds: int) -> list[Figure]:
    spec = SandboxSpec("benchmark", image=image)
    with tempfile.TemporaryDirectory(prefix="termrl-bench-", dir="/tmp") as folder:
        state = Path(folder)
        state.chmod(0o755)
        async with DockerProvider(state=state) as provider:
            bare = _Bare(provider, image)
            return [
                await _create(provider, spec, bare, rounds),
                await _single(provider, spec, bare, 3 * rounds),
                await _at_once(provider, spec, bare, 3 * rounds),
                *await asyncio.to_thread(_killed, provider, state, image),
            ]


def main() -> int:
    """Measure and print; 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--image", default=_IMAGE)
    options = parser.parse_args()
    figures = asyncio.run(_measure(options.image, options.rounds))
    report("Docker sandboxes", figures, as_json=options.json)
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
