"""Where a run's environments are: in this process, behind an OpenEnv server, or behind one that the run starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from termrl.config import TrainConfig
from termrl.environment.address import Address, read_token
from termrl.environment.child import ServerProcess
from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.environment.remote_config import RemoteSettings
from termrl.environment.routes import get_json
from termrl.errors import ConfigError, EnvironmentLostError, TaskError
from termrl.rollout.scheduler import EnvironmentFactory
from termrl.sandboxes import SandboxProvider, open_provider
from termrl.settings import to_toml
from termrl.tasks.task import Task

if TYPE_CHECKING:
    from termrl.evaluation.config import EvalConfig

SETTINGS, LOG = "environment-server.toml", "environment-server.log"
TASKS = "tasks"

_RESTARTS = 10
_LOOK_S = 0.5
_IDLE_S = 1800.0


@dataclass(frozen=True)
class Environments:
    """What a run's scheduler needs of them.

    Attributes:
        factory: gives each episode its environment.
        live: counts those that are up.
        ready: returns once they can be made; raises :class:`~termrl.errors.EnvironmentLostError` if they cannot.
        recover: returns once environments can be had again after one was lost; ``None`` where there is nothing to
            wait for.
    """

    factory: EnvironmentFactory
    live: Callable[[], int]
    ready: Callable[[], Awaitable[None]]
    recover: Callable[[], Awaitable[None]] | None = None


@asynccontextmanager
async def open_environments(
    config: TrainConfig,
    tasks: Mapping[str, Task],
    run: Path,
    *,
    open_sandboxes: Callable[..., SandboxProvider] = open_provider,
) -> AsyncIterator[Environments]:
    """Open what the config asks for; whatever was started for it is gone after.

    Args:
        tasks: all of the run, by id.
        run: the run's folder, where a server that is started keeps its log.
        open_sandboxes: makes the provider of environments in this process.

    Raises:
        SandboxStartError, EnvironmentLostError: it cannot be opened.
    """
    settings = config.environment
    if not settings.serve or settings.url is not None:
        async with given_environments(config, tasks, open_sandboxes=open_sandboxes) as environments:
            yield environments
        return
    async with ServerProcess(write_serve_settings(config, tasks, run), log=run / LOG) as child:
        child.spawn()
        remote = RemoteEnvironments(None, settings, tasks, child=child)
        yield Environments(remote, lambda: remote.live, remote.ready, remote.recover)


@asynccontextmanager
async def given_environments(
    config: TrainConfig | EvalConfig,
    tasks: Mapping[str, Task],
    *,
    open_sandboxes: Callable[..., SandboxProvider] = open_provider,
) -> AsyncIterator[Environments]:
    """As :func:`open_environments`, behind ``environment.url`` or in this process: nothing is started for it."""
    if (url := config.environment.url) is not None:
        remote = RemoteEnvironments(url, config.environment, tasks)
        yield Environments(remote, lambda: remote.live, _at_once, remote.recover)
        return
    from termrl.environment.terminal import LocalEnvironmentFactory

    async with open_sandboxes(config.sandbox.backend, **config.sandbox_settings()) as provider:
        factory = LocalEnvironmentFactory(
            tasks, provider, command_timeout_s=config.episode.command_timeout_s, rules=config.verify.rules()
        )
        yield Environments(factory, lambda: provider.live, _at_once)


async def _at_once() -> None:
    """Nothing is to be waited for."""


class RemoteEnvironments:
    """The environments of one server, which may go and come back.

    Args:
        url: where the server is; ``None`` where that is known only once ``child`` is :meth:`ready`.
        settings: how it is talked to.
        tasks: what the run believes the tasks to be, by id; an instruction that differs ends the run.
        child: the server, where it is this run's own. It is started again when it ends, a bounded number of times.
    """

    def __init__(
        self,
        url: str | None,
        settings: RemoteSettings,
        tasks: Mapping[str, Task],
        *,
        child: ServerProcess | None = None,
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._child = child
        self._token = read_token(settings.token_file) if child is None else None
        self._restarts = 0
        self._lock = asyncio.Lock()
        self._outage_began: float | None = None
        self.live = 0
        if url is not None:
            self._connect(url)

    async def ready(self) -> None:
        """Wait for the child, which was started.

        Raises:
            EnvironmentLostError: it ended, or does not accept connections in time.
        """
        assert self._child is not None
        self._connect(await self._child.listening())

    def create(self) -> Environment:
        """A new session, not yet reset.

        Raises:
            EnvironmentLostError: the run's own server has ended.
        """
        if self._child is not None and not self._child.running:
            raise EnvironmentLostError(self._child.ending)
        return _Session(self, self._factory.create(), self._tasks)

    async def recover(self) -> None:
        """Return when the server answers again, or has had its time to come back (one bound for each outage).

        A server of the run's own is started again.
        """
        async with self._lock:
            began = self._outage_began = self._outage_began or time.monotonic()
            while not await self._answers():
                if time.monotonic() - began >= self._settings.capacity_wait_s:
                    return
                await asyncio.sleep(_LOOK_S)
            self._outage_began = None

    async def _answers(self) -> bool:
        try:
            if self._child is not None and not self._child.running:
                if self._restarts >= _RESTARTS:
                    return False
                self._restarts += 1
                await self._child.stop()
                self._child.spawn()
                await self.ready()
            await get_json(self._address, "/health", token=self._token, timeout_s=self._settings.connect_timeout_s)
        except (EnvironmentLostError, ConfigError):
            return False
        return True

    def _connect(self, url: str) -> None:
        from termrl.environment.remote import RemoteEnvironmentFactory

        self._address = Address.of(url)
        self._factory = RemoteEnvironmentFactory(url, settings=self._settings)


class _Session(Environment):
    """One remote session, counted while it is open; its tasks must be those that the run knows."""

    def __init__(self, owner: RemoteEnvironments, inner: Environment, tasks: Mapping[str, Task]) -> None:
        self._owner = owner
        self._inner = inner
        self._tasks = tasks
        self._open = True
        self.admission_s = inner.admission_s
        owner.live += 1

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        observation = await self._inner.reset(task_id, seed=seed, episode_id=episode_id)
        task = self._tasks.get(task_id)
        given = observation.instruction.strip()
        if task is not None and given and given != task.instruction.strip():
            raise TaskError(
                f"the environment server's task {task_id} is another than this run's: {given[:200]!r}",
                hint="serve the same task folders; generated ones need the same seed (docs/openenv.md, Training)",
            )
        return observation

    async def step(self, action: Action) -> Observation:
        return await self._inner.step(action)

    def state(self) -> State:
        return self._inner.state()

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            self._owner.live -= self._open
            self._open = False


def write_serve_settings(config: TrainConfig, tasks: Mapping[str, Task], run: Path) -> Path:
    """Write what `termrl serve` needs to do what this process would do itself."""
    # more than live at once: a slot is free only when its sandbox is gone, and the next episode need not wait for that
    sessions = config.rollout.concurrency + max(8, config.rollout.concurrency // 4)
    memory_mb = max((task.sandbox.memory_mb or 0 for task in tasks.values()), default=0)
    settings = {
        "tasks": _task_folders(config, run),
        "skip_broken": config.tasks.skip_broken,
        "max_sessions": sessions,
        "max_memory_mb": max(1, sessions * memory_mb),
        "command_timeout_s": config.episode.command_timeout_s,
        "reset_s": config.episode.reset_s,
        "idle_s": config.stop.engine_s + _IDLE_S,
        "sandbox": config.sandbox.model_dump(mode="json"),
        "images": config.images.model_dump(mode="json"),
        "verify": config.verify.model_dump(mode="json"),
    }
    path = run / SETTINGS
    path.write_text(to_toml(settings), encoding="utf-8")
    return path


def _task_folders(config: TrainConfig, run: Path) -> list[Path]:
    if config.tasks.dir is not None and config.evaluation.dir is not None:
        return [config.tasks.dir.absolute(), config.evaluation.dir.absolute()]
    return [(run / TASKS / name).absolute() for name in ("train", "held-out")]
