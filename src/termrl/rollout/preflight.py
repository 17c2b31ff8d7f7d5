"""What is checked of an environment server before a run writes anything: it answers, has the tasks, and the room."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from termrl.config import EnvironmentConfig
from termrl.environment.address import Address, read_token
from termrl.environment.client import ClientOptions, EnvClient
from termrl.environment.protocol import Action
from termrl.environment.remote import RemoteEnvironmentFactory
from termrl.environment.routes import get_json
from termrl.environment.verdicts import verdict_of
from termrl.errors import CapacityError, ConfigError, EnvironmentLostError, SandboxError, TaskError
from termrl.tasks.task import Task
from termrl.verifier.verdict import Outcome

_NAMED = 10
_LOOK_S = 1.0

Say = Callable[[str], None]


async def check_server(
    settings: EnvironmentConfig, tasks: Mapping[str, Task], *, sessions: int, lockstep: bool, say: Say
) -> None:
    """Refuse a server that the run could not use, and wait for room on one that others use.

    Args:
        settings: with a ``url``.
        tasks: all of the run, by id.
        sessions: how many the run has at once; ``lockstep``: none begins before all have one.
        say: told what is waited for or odd.

    Raises:
        EnvironmentLostError: it does not answer.
        ConfigError: it refuses the token, has too few sessions, or lets the policy read its tests.
        TaskError: it does not serve tasks of the run; names them.
    """
    assert settings.url is not None
    server = _Server(settings.url, settings, lockstep=lockstep)
    await server.get("/health")
    listed = _listed(await server.get("/tasks"))
    if listed is not None:
        _check_tasks(server.url, list(tasks), listed)
    # what so many sessions may use, were they all of the largest tasks
    memory_mb = sessions * max((task.sandbox.memory_mb or 0 for task in tasks.values()), default=0)
    await server.check_room(sessions, memory_mb, say)
    if listed is None:
        await _check_scoring(settings, next(iter(tasks)), say)


class _Server:
    def __init__(self, url: str, settings: EnvironmentConfig, *, lockstep: bool) -> None:
        self.url = url
        self._settings = settings
        self._lockstep = lockstep
        self._address = Address.of(url)
        self._options = ClientOptions(
            token=read_token(self._settings.token_file),
            connect_timeout_s=self._settings.connect_timeout_s,
            ping_interval_s=self._settings.ping_interval_s,
            ping_timeout_s=self._settings.ping_timeout_s,
        )

    async def get(self, route: str) -> Any:
        """What a route answers; ``None`` where there is none."""
        return await get_json(
            self._address, route, token=self._options.token, timeout_s=self._settings.connect_timeout_s
        )

    async def check_room(self, sessions: int, memory_mb: int, say: Say) -> None:
        """In lock-step all of a wave are in session at once: without room for them none would ever begin."""
        capacity = await self.get("/capacity")
        if not isinstance(capacity, dict):
            await self._check_admission(sessions, say)
            return
        most = _number(capacity.get("max_sessions"))
        if most is not None and most < sessions:
            self._too_few(f"has {most} sessions", sessions, f"--max-sessions {sessions}", say)
        most_mb = _number(capacity.get("max_memory_mb"))
        if most_mb is not None and most_mb < memory_mb:
            what = f"has {most_mb} MiB for tasks ({memory_mb} MiB are needed)"
            self._too_few(what, sessions, f"--max-memory-mb {memory_mb}", say)
        if self._lockstep:
            await self._wait_for_room(capacity, sessions, memory_mb, say)

    async def _wait_for_room(self, capacity: Mapping[str, Any], sessions: int, memory_mb: int, say: Say) -> None:
        until = time.monotonic() + self._settings.capacity_wait_s
        said = False
        while True:
            active, taken_mb = _number(capacity.get("active_sessions")) or 0, _number(capacity.get("memory_mb")) or 0
            most, most_mb = _number(capacity.get("max_sessions")), _number(capacity.get("max_memory_mb"))
            if (most is None or most - active >= sessions) and (most_mb is None or most_mb - taken_mb >= memory_mb):
                return
            if time.monotonic() >= until:
                raise CapacityError(
                    f"{self.url}: {sessions} free sessions are needed, but others keep {active} of {most} in use",
                    hint="rollout.concurrency = fewer episodes at once, or wait longer: environment.capacity_wait_s",
                )
            if not said:
                say(f"{self.url}: waiting for {sessions} free sessions ({active} of {most} are in use)")
                said = True
            await asyncio.sleep(_LOOK_S)
            capacity = await self.get("/capacity") or {}

    async def _check_admission(self, sessions: int, say: Say) -> None:
        """A server that does not tell: open so many sessions at once and count."""
        clients = [EnvClient(self.url, self._options) for _ in range(sessions)]

        async def admitted(client: EnvClient) -> bool:
            with contextlib.suppress(CapacityError):
                await client.connect()
                await client.state_raw()
                return True
            return False

        try:
            count = sum(await asyncio.gather(*(admitted(client) for client in clients)))
        finally:
            await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
        if count < sessions:
            self._too_few(f"admits {count} sessions at once", sessions, f"MAX_CONCURRENT_ENVS={sessions}", say)

    def _too_few(self, what: str, sessions: int, there: str, say: Say) -> None:
        problem = f"{self.url} {what}, but {sessions} episodes run at once"
        if not self._lockstep:
            say(f"{problem}: the others wait for a free slot")
            return
        raise ConfigError(
            f"{problem}, and in lock-step none of them begins before all have an environment",
            hint=f"--rollout.concurrency fewer (at least rollout.samples), or start the server with {there}",
        )


async def _check_scoring(settings: EnvironmentConfig, task_id: str, say: Say) -> None:
    """A server that is not ours: one reset and one evaluate of an untouched episode say who scores, and whether."""
    assert settings.url is not None
    environment = RemoteEnvironmentFactory(settings.url, settings=settings).create()
    try:
        await environment.reset(task_id)
        answer = await environment.step(Action(action_type="evaluate"))
    except SandboxError as error:
        raise EnvironmentLostError(f"{settings.url}: {task_id}: {error.message}", hint=error.hint) from None
    finally:
        await environment.close()
    verdict = verdict_of(answer)
    if verdict.outcome is Outcome.NO_VERDICT:
        say(f"{settings.url}: {task_id}: an untouched episode got no verdict ({verdict.cause}: {verdict.detail})")


def _check_tasks(url: str, wanted: Sequence[str], served: frozenset[str]) -> None:
    missing = [name for name in wanted if name not in served]
    if not missing:
        return
    more = [f"and {len(missing) - _NAMED} more"] if len(missing) > _NAMED else []
    raise TaskError(
        "\n".join([f"{url} does not serve {len(missing)} of the run's {len(wanted)} tasks:", *missing[:_NAMED], *more]),
        hint="serve the same folders; how the bundled tasks are served: docs/openenv.md, Training",
    )


def _listed(answer: Any) -> frozenset[str] | None:
    """The ids of our own server's list; ``None`` from a server that has no such list."""
    tasks = answer.get("tasks") if isinstance(answer, dict) else None
    if not isinstance(tasks, list):
        return None
    return frozenset(str(task["id"]) for task in tasks if isinstance(task, dict) and "id" in task)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
