"""The environment server against its bars, beside openenv's own echo-like environment and the same work in process.

Round trips, command rates, start and memory, what 100 clients killed in mid-step and a server killed with live
sessions leave behind, and the same training run with its environments in process and behind the server. ``--tiny``
trains a random model whose vocabulary holds whole commands, so that nearly all its time is the environments'.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks._report import Figure, report  # noqa: E402
from termrl.environment.address import Address  # noqa: E402
from termrl.environment.client import ClientOptions, EnvClient  # noqa: E402
from termrl.environment.protocol import Action, Environment  # noqa: E402
from termrl.environment.remote import RemoteEnvironmentFactory  # noqa: E402
from termrl.environment.routes import get_json  # noqa: E402
from termrl.environment.terminal import LocalEnvironmentFactory  # noqa: E402
from termrl.runs.files import read_jsonl  # noqa: E402
from termrl.sandboxes.bubblewrap import BubblewrapProvider  # noqa: E402
from termrl.sandboxes.sweep import remains  # noqa: E402
from termrl.tasks.taskset import TaskSet  # noqa: E402
from tests.endtoend.tiny import write_model, write_tasks  # noqa: E402

_SESSIONS = 64
_TASK = "make-apple"
_TRUE = Action(command="true")
_SETTLE_S = 30.0
_OPTIONS = ClientOptions(capacity_wait_s=60.0)
_ECHO = """
import asyncio, sys
from tests.environment.upstreams import echo_app, hosted
async def main():
    async with hosted(echo_app(max_sessions=int(sys.argv[1]))) as url:
        print(url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
# Opens so many sessions, runs a long command in each, says so, and waits to be killed.
_VICTIM = """
import asyncio, sys
from termrl.environment.client import ClientOptions, EnvClient
from termrl.environment.protocol import Action
async def one(url):
    client = EnvClient(url, ClientOptions(capacity_wait_s=60))
    await client.connect()
    await client.reset(sys.argv[3])
    return asyncio.create_task(client.step(Action(command="sleep 120", wait_seconds=120)))
async def main():
    steps = await asyncio.gather(*(one(sys.argv[1]) for _ in range(int(sys.argv[2]))))
    await asyncio.sleep(0.5)
    print("in step", flush=True)
    await asyncio.gather(*steps)
asyncio.run(main())
"""


@dataclass(frozen=True)
class Server:
    """One server process, where it listens and how long it took until then."""

    url: str
    process: subprocess.Popen[str]
    start_s: float

    @property
    def rss_mb(self) -> float:
        """MiB resident."""
        return _status(self.process.pid, "VmRSS") / 1024

    def use(self) -> dict[str, int]:
        """Its descriptors and threads."""
        return {
            "descriptors": sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir()),
            "threads": _status(self.process.pid, "Threads"),
        }


@contextmanager
def _started(command: Sequence[str], said: str, *, state: Path) -> Iterator[Server]:
    """A server whose first line is ``said`` and its URL; killed after."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TERMRL_STATE_DIR": str(state)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith(said):
            raise SystemExit(f"{command[1:5]} did not start: {line!r}")
        yield Server(line.removeprefix(said).strip(), process, time.perf_counter() - begin)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextmanager
def _serving(tasks: Path, state: Path, *, sessions: int = _SESSIONS, files: int | None = None) -> Iterator[Server]:
    serve = [sys.executable, "-m", "termrl", "serve", str(tasks), "--port", "0"]
    serve += ["--max-sessions", str(sessions), "--max-memory-mb", str(sessions * 256)]
    limited = ["bash", "-c", f'ulimit -n {files} && exec "$@"', "bash", *serve] if files else serve
    with _started(limited, "termrl serve: listening on ", state=state) as server:
        yield server


@contextmanager
def _echoing(state: Path) -> Iterator[Server]:
    with _started([sys.executable, "-c", _ECHO, str(_SESSIONS)], "http", state=state) as server:
        yield Server(f"http{server.url}", server.process, server.start_s)


async def _times_ms(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Median of ``count`` calls after a tenth as many."""
    times = []
    for number in range(count + count // 10):
        begin = time.perf_counter()
        await call()
        if number >= count // 10:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


async def _per_second(calls: Sequence[Callable[[], Awaitable[object]]], count: int) -> float:
    async def work(call: Callable[[], Awaitable[object]]) -> None:
        for _ in range(count):
            await call()

    begin = time.perf_counter()
    await asyncio.gather(*(work(call) for call in calls))
    return len(calls) * count / (time.perf_counter() - begin)


async def _noop(ours: Server, echo: Server, rounds: int) -> Figure:
    """A step that reaches no sandbox (there is no episode yet), against an echo on openenv's own server."""
    async with EnvClient(ours.url, _OPTIONS) as client, EnvClient(echo.url, _OPTIONS) as other:
        await other.reset_raw({})
        value = await _times_ms(lambda: client.step(_TRUE), rounds)
        peer = await _times_ms(lambda: other.step_raw({"message": "true"}), rounds)
    return Figure("openenv_noop_step", value, "ms", "≤ 1.0 ms", value <= 1.0, peer, value / peer)


async def _exec(ours: Server, local: LocalEnvironmentFactory, rounds: int) -> list[Figure]:
    """`true` in one sandbox, then in 64 at once: through the server and in process."""
    remote = RemoteEnvironmentFactory(ours.url)
    one: dict[str, float] = {}
    rate: dict[str, float] = {}
    for name, factory in (("here", local), ("there", remote)):
        environments: list[Environment] = [factory.create() for _ in range(_SESSIONS)]
        try:
            await asyncio.gather(*(environment.reset(_TASK) for environment in environments))
            one[name] = await _times_ms(lambda only=environments[0]: only.step(_TRUE), rounds)
            calls = [lambda one=environment: one.step(_TRUE) for environment in environments]
            await _per_second(calls, 2)
            rate[name] = await _per_second(calls, max(rounds // 10, 5))
        finally:
            await asyncio.gather(*(environment.close() for environment in environments))
    value, peer = one["there"], one["here"]
    there, here = rate["there"], rate["here"]
    return [
        Figure("openenv_exec", value, "ms", "≤ peer + 2 ms", value - peer <= 2.0, peer, value / peer),
        Figure("openenv_exec_rate_64", there, "exec/s", "≥ 250/s", there >= 250, here, there / here),
    ]


async def _memory(ours: Server, echo: Server) -> Figure:
    """The server's own memory with 64 sessions that were reset and do nothing (sandboxes apart)."""
    clients = [EnvClient(server.url, _OPTIONS) for server in (ours, echo) for _ in range(_SESSIONS)]
    try:
        for client in clients:
            await client.connect()
            await client.reset_raw({"task_id": _TASK})
        value, peer = ours.rss_mb, echo.rss_mb
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    return Figure("openenv_rss_64_idle", value, "MiB", "≤ 250 MiB", value <= 250, peer, value / peer)


async def _killed_clients(tasks: Path, state: Path, count: int) -> Figure:
    """What is left of clients that were killed in mid-step, on a server that may open 256 files."""
    at_once = 50
    with _serving(tasks, state, sessions=at_once, files=256) as server:

        async def kill_some(some: int) -> dict[str, int]:
            victims = await asyncio.to_thread(_victims, server, some)
            if _sandboxes(server.process.pid) < some:
                raise SystemExit("clients in mid-step have no sandboxes")
            await asyncio.to_thread(_kill, victims)
            return await _quiet(server)

        left = await kill_some(at_once)
        before = server.use()
        for start in range(0, count, at_once):
            left = await kill_some(min(at_once, count - start))
        after = server.use()
    leaked = {name: max(0, after[name] - before[name]) for name in before} | left
    print(f"{count} clients killed in mid-step: {before} before, {after} after, {left} left", file=sys.stderr)
    total = sum(leaked.values())
    return Figure("openenv_killed_clients_leak", total, "leaked", "0", total == 0)


def _victims(server: Server, count: int) -> list[subprocess.Popen[str]]:
    """Processes that together have ``count`` clients in mid-step."""
    shares = [count // 2, count - count // 2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _VICTIM, server.url, str(share), _TASK],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        for share in shares
        if share
    ]
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "in step":
            raise SystemExit("a client did not get its session")
    return processes


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


async def _quiet(server: Server) -> dict[str, int]:
    """Wait until the server has neither sessions nor sandboxes, or no longer; returns what it still has."""
    until = time.monotonic() + _SETTLE_S
    while True:
        capacity = await get_json(Address.of(server.url), "/capacity")
        boxes = _sandboxes(server.process.pid)
        left = {"slots": int(capacity["active_sessions"]), "sandboxes": boxes}
        if not any(left.values()) or time.monotonic() > until:
            await asyncio.sleep(0.5)
            return left
        await asyncio.sleep(0.05)


async def _killed_server(tasks: Path, state: Path, count: int = 20) -> Figure:
    """SIGKILL to a server with live sessions; what is left once the next one has started."""
    with _serving(tasks, state) as server:
        clients = [EnvClient(server.url, _OPTIONS) for _ in range(count)]
        for client in clients:
            await client.connect()
            await client.reset(_TASK)
            await client.step(Action(command="sleep 600 & echo started"))
        server.process.kill()
        server.process.wait()
        for client in clients:
            await client.close()
    before = len(await asyncio.to_thread(remains, state))
    with _serving(tasks, state):
        left = await asyncio.to_thread(remains, state)
    print(
        f"server killed with {count} sessions: {before} things before the next start, {len(left)} after",
        file=sys.stderr,
    )
    return Figure("openenv_killed_server_remains", len(left), "things", "0", not left, before)


def _training(folder: Path, state: Path, arguments: argparse.Namespace) -> list[Figure]:
    """The same run twice, in process and behind a server that it starts."""
    if not arguments.tiny:
        config = ["-c", str(ROOT / "examples" / "first-steps.toml")]
        settings: dict[str, object] = {"steps": arguments.steps or 4}
    else:
        write_model(folder / "model")
        write_tasks(folder / "held-out", ("cedar",), prefix="eval")
        config = []
        settings = {
            "model.path": folder / "model",
            "model.threads": 1,
            "tasks.dir": folder / "tasks",
            "evaluation.dir": folder / "held-out",
            "rollout.groups": 4,
            "rollout.samples": 16,
            "episode.max_turns": 3,
            "episode.max_tokens": 4,
            "training.lr": 0.005,
            "steps": arguments.steps or 10,
        }
    flags = [*config, *(f"--{key}={value}" for key, value in settings.items())]
    found: dict[str, tuple[list[Any], float]] = {}
    for name, more in (("here", []), ("served", ["--environment.serve"])):
        run = folder / name
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "termrl", "train", *flags, *more, "--run-dir", str(run)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERMRL_STATE_DIR": str(state)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        seconds = time.perf_counter() - begin
        episodes = read_jsonl(run / "episodes.jsonl")
        found[name] = ([(e["step"], e["task_id"], e["sample"], e["reward"], e["tokens"]) for e in episodes], seconds)
    (here, here_s), (there, there_s) = found["here"], found["served"]
    different = sum(one != other for one, other in zip(here, there, strict=True))
    ratio = there_s / here_s
    wall = Figure("openenv_training_wall", there_s, "s", "≤ 1.1 × peer", ratio <= 1.1, here_s, ratio)
    same = Figure("openenv_training_differs", different, f"of {len(here)} episodes", "0", different == 0)
    return [same, wall]


async def _measure(folder: Path, state: Path, arguments: argparse.Namespace) -> list[Figure]:
    tasks = folder / "tasks"
    with _serving(tasks, state) as ours, _echoing(state) as echo:
        figures = [
            Figure(
                *("openenv_server_start", ours.start_s, "s", "≤ 4 s", ours.start_s <= 4),
                *(echo.start_s, ours.start_s / echo.start_s),
            ),
            await _memory(ours, echo),
            await _noop(ours, echo, arguments.rounds * 5),
        ]
        async with BubblewrapProvider(state=state) as provider:
            local = LocalEnvironmentFactory(TaskSet.load(tasks), provider)
            figures += await _exec(ours, local, arguments.rounds)
    figures.append(await _killed_clients(tasks, state, arguments.clients))
    figures.append(await _killed_server(tasks, state))
    return figures


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    with tempfile.TemporaryDirectory(prefix="termrl-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        state = folder / "state"
        state.mkdir(mode=0o755)
        write_tasks(folder / "tasks", ("apple", "berry"))
        figures = asyncio.run(_measure(folder, state, arguments))
        return [*figures, *_training(folder, state, arguments)]


def _status(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _sandboxes(pid: int) -> int:
    """bubblewrap processes below a server."""
    import psutil

    count = 0
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            count += child.name() == "bwrap"
    return count


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="train a tiny random model instead of the bundled one")
    parser.add_argument("--rounds", type=int, default=200, help="repetitions of one command")
    parser.add_argument("--clients", type=int, default=100, help="clients that are killed in mid-step")
    parser.add_argument("--steps", type=int, help="training steps")
    arguments = parser.parse_args()
    report("Environment server (OpenEnv)", measure(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
