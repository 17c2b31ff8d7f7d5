"""Servers of openenv's own classes that play Terminal-Bench 2's environment as it was, as it is, and an echo.

``older_app`` and ``newer_app`` run each session in a bubblewrap container of its own, with the folders that the real
ones have; ``hosted`` serves an app in this event loop. As a program: ``python -m tests.environment.upstreams older
TASKS [PORT]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

# first: it imports openenv without what no test needs
from termrl.environment.server.openenv import Action, Environment, Observation, State  # isort: skip
from openenv.core.env_server import create_app
from pydantic import Field

from termrl.sandboxes.host import find_bwrap
from termrl.serving import bind, running, url_of

HARNESS = "tests/test.sh"


class TbAction(Action):
    """tbench2's action."""

    action_type: str = "exec"
    command: str = ""
    session_id: str | None = None
    block: bool = True
    wait_seconds: float | None = None
    file_path: str = ""
    content: str = ""


class TbObservation(Observation):
    """tbench2's observation."""

    instruction: str = ""
    output: str = ""
    success: bool = True
    error: str = ""
    task_id: str = ""
    task_path: str = ""
    session_id: str | None = None
    action_type: str = ""
    info: dict[str, Any] = Field(default_factory=dict)


class TbState(State):
    """tbench2's state."""

    task_id: str = ""
    task_path: str = ""
    session_id: str = ""
    terminal_ready: bool = False
    last_action_type: str = ""
    last_command: str = ""
    last_output: str = ""


class Container:
    """A root folder that programs run in; nothing of the host but ``/usr`` is there."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="upstream-"))
        for name in ("app", "task", "logs", "tmp", "usr", "proc", "dev", "etc"):
            (self.root / name).mkdir()
        for name in ("bin", "lib", "lib64", "sbin"):
            (self.root / name).symlink_to(f"usr/{name}")

    def run(self, arguments: list[str], *, workdir: str, timeout_s: float | None = None) -> tuple[int, str]:
        """Exit code and output of a program."""
        bwrap = [str(find_bwrap()[0]), "--bind", str(self.root), "/", "--ro-bind", "/usr", "/usr", "--dev", "/dev"]
        bwrap += ["--proc", "/proc", "--unshare-pid", "--as-pid-1", "--chdir", workdir, "--clearenv"]
        bwrap += ["--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin"]
        if not self.root.is_dir():
            raise RuntimeError("No such container")
        done = subprocess.run(
            [*bwrap, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def remove(self) -> None:
        """Take it away."""
        shutil.rmtree(self.root, ignore_errors=True)


class _Upstream(Environment[TbAction, TbObservation, TbState]):
    """What both have: a session, its container, its state."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, tasks: Path, **knobs: Any) -> None:
        super().__init__()
        self.tasks = tasks
        self.knobs = knobs
        self.container: Container | None = None
        self._state = TbState()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TbObservation:
        self.close()
        task = self.tasks / str(kwargs.get("task_id"))
        if not task.is_dir():
            raise FileNotFoundError(f"Task path not found: {task}")
        self.task = task
        self.container = Container()
        self.prepare(task, self.container)
        self._state = TbState(episode_id=episode_id, task_id=task.name, task_path=str(task), terminal_ready=True)
        return self.observed("reset", info=self.info(), reward=0.0)

    def step(self, action: TbAction, timeout_s: float | None = None, **kwargs: Any) -> TbObservation:
        if self.container is None:
            raise RuntimeError("TB2 environment not initialized. Call reset() first.")
        self._state.step_count += 1
        self._state.last_action_type, self._state.last_command = action.action_type, action.command
        try:
            return self.act(action, self.container)
        except Exception as error:
            return self.observed(action.action_type, success=False, error=str(error))

    def observed(self, action_type: str, **fields: Any) -> TbObservation:
        fields.setdefault("session_id", "tb2-session")
        return TbObservation(
            instruction=(self.task / "instruction.md").read_text(),
            task_id=self._state.task_id,
            task_path=self._state.task_path,
            action_type=action_type,
            **fields,
        )

    @property
    def state(self) -> TbState:
        return self._state

    def close(self) -> None:
        container, self.container = self.container, None
        if container is not None:
            container.remove()

    def prepare(self, task: Path, container: Container) -> None:
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        raise NotImplementedError

    def act(self, action: TbAction, container: Container) -> TbObservation:
        raise NotImplementedError


class OlderUpstream(_Upstream):
    """Commands run in /task, inside single quotes of the server's; evaluate is bare pytest; budgets are hidden.

    Knobs: ``exec_cap_s`` cuts every command off, as its local mode does.
    """

    def prepare(self, task: Path, container: Container) -> None:
        shutil.copytree(task, container.root / "task", dirs_exist_ok=True)
        environment = task / "environment"
        if environment.is_dir():
            shutil.copytree(environment, container.root / "app", dirs_exist_ok=True)

    def info(self) -> dict[str, Any]:
        return {}

    def act(self, action: TbAction, container: Container) -> TbObservation:
        if action.action_type == "exec":
            command = shlex.split(f"bash -c 'cd /task && {action.command}'")
            try:
                code, output = container.run(command, workdir="/task", timeout_s=self.knobs.get("exec_cap_s"))
            except subprocess.TimeoutExpired as cut:
                return self.observed("exec", output=f"Command did not complete within {cut.timeout} seconds.")
            return self.observed("exec", output=output, success=code == 0)
        if action.action_type == "evaluate":
            code, output = container.run(["bash", "-c", "cd /task && python3 -m pytest -q tests/ -rA"], workdir="/task")
            passed = code == 0
            info = {"tests_passed": passed, "exit_code": code}
            return self.observed("evaluate", output=output, reward=float(passed), done=True, info=info)
        raise ValueError(f"Unsupported action_type in Docker mode: {action.action_type}")


class NewerUpstream(_Upstream):
    """Canonical evaluate, budgets in reset's info, tests absent while the policy acts.

    Knobs: ``harness`` names another one; ``exposed`` leaves the tests readable; ``breaks`` makes the first so many
    evaluates of all sessions fail by the server's own fault, and ``loses`` removes the container before them.
    """

    def prepare(self, task: Path, container: Container) -> None:
        environment = task / "environment"
        if environment.is_dir():
            shutil.copytree(environment, container.root / "app", dirs_exist_ok=True)
        if self.knobs.get("exposed"):
            shutil.copytree(task / "tests", container.root / "tests")

    def info(self) -> dict[str, Any]:
        return {
            "verifier_timeout_sec": self.knobs.get("verifier_timeout_sec", 900.0),
            "command_timeout_s": self.knobs.get("command_timeout_s", 20.0),
            "docker_image": "upstream/task:1",
        }

    def act(self, action: TbAction, container: Container) -> TbObservation:
        if action.action_type == "exec":
            cap = self.info()["command_timeout_s"]
            code, output = container.run(["bash", "-c", action.command], workdir="/app", timeout_s=cap)
            return self.observed("exec", output=output, success=code == 0, reward=0.0)
        if action.action_type == "evaluate":
            counts = self.knobs.get("counts", {})
            counts["evaluates"] = counts.get("evaluates", 0) + 1
            if counts["evaluates"] <= self.knobs.get("loses", 0):
                container.remove()
            if counts["evaluates"] <= self.knobs.get("breaks", 0):
                raise RuntimeError("500 Server Error: dockerd")
            return self.evaluate(container)
        raise ValueError(f"Unsupported action_type: {action.action_type}")

    def evaluate(self, container: Container) -> TbObservation:
        logs, tests = container.root / "logs/verifier", container.root / "tests"
        for folder in (logs, tests):
            shutil.rmtree(folder, ignore_errors=True)
        logs.mkdir()
        shutil.copytree(self.task / "tests", tests)
        try:
            budget_s = self.info()["verifier_timeout_sec"]
            _, output = container.run(["bash", "/tests/test.sh"], workdir="/app", timeout_s=budget_s)
            text = (logs / "reward.txt").read_text() if (logs / "reward.txt").is_file() else ""
        finally:
            for folder in (logs, tests):
                shutil.rmtree(folder, ignore_errors=True)
        if not text.strip():
            why = "no verdict: /logs/verifier/reward.txt is missing or empty"
            return self.observed("evaluate", output=output, success=False, error=why)
        reward = float(text)
        info = {"tests_passed": reward == 1.0, "harness": self.knobs.get("harness", HARNESS)}
        return self.observed("evaluate", output=output, reward=reward, done=True, info=info)


class EchoAction(Action):
    """Something to say, and how long to think about it first."""

    message: str
    sleep_s: float = 0.0


class EchoObservation(Observation):
    """What was said."""

    echoed: str = ""


class Echo(Environment[EchoAction, EchoObservation, State]):
    """An environment that has nothing to do with terminals."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        self._state = State(episode_id=episode_id)
        return EchoObservation(echoed=f"ready {kwargs.get('flavour', '')}".strip())

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        if action.message == "raise":
            raise RuntimeError("the echo broke")
        time.sleep(action.sleep_s)
        self._state.step_count += 1
        return EchoObservation(echoed=action.message, reward=len(action.message) / 10, done=action.message == "bye")

    @property
    def state(self) -> State:
        return self._state


def older_app(tasks: Path, *, max_sessions: int = 8, **knobs: Any) -> Any:
    """The environment before it scored by test.sh."""
    return _app(lambda: OlderUpstream(tasks, **knobs), max_sessions)


def newer_app(tasks: Path, *, max_sessions: int = 8, **knobs: Any) -> Any:
    """The environment since it scores by test.sh."""
    return _app(lambda: NewerUpstream(tasks, **knobs), max_sessions)


def echo_app(*, max_sessions: int = 8) -> Any:
    """An environment of another kind."""
    return create_app(Echo, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=max_sessions)


@contextlib.asynccontextmanager
async def hosted(app: Any, **options: Any) -> AsyncIterator[str]:
    """The URL of ``app``, served while the block runs; ``options`` are uvicorn's."""
    listener = bind("127.0.0.1", 0)
    options = {"ws": "websockets-sansio", "timeout_graceful_shutdown": 1, **options}
    async with running(app, listener, **options):
        yield url_of(listener, "127.0.0.1")


@contextlib.contextmanager
def hosted_in_thread(app: Any) -> Any:
    """As :func:`hosted`, for a caller without an event loop."""
    ready, stop, where = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with hosted(app) as url:
            where.append(url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield where[0]
    finally:
        stop.set()
        thread.join(10)


def _app(make: Callable[[], _Upstream], max_sessions: int) -> Any:
    return create_app(
        make, TbAction, TbObservation, env_name="tbench2_env", max_concurrent_envs=max_sessions, state_cls=TbState
    )


async def _main(kind: str, tasks: Path, port: int) -> None:
    listener = bind("127.0.0.1", port)
    app = {"older": older_app, "newer": newer_app}[kind](tasks)
    async with running(app, listener, ws="websockets-sansio"):
        print(f"{kind}: listening on {url_of(listener, '127.0.0.1')}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
