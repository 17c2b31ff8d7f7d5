"""One client's environment: its slot, one operation at a time, a deadline for each, and an end that always comes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from termrl.environment.budgets import Budgets
from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.environment.server.admission import Admission, Lease
from termrl.environment.server.metrics import ServerMetrics
from termrl.errors import CapacityError, EnvironmentLostError, TermrlError
from termrl.tasks.task import Task

T = TypeVar("T")

log = logging.getLogger(__name__)

_MAX_LOOK_S = 5.0
# Sandboxes that start at once; more gain nothing, and each has files open for that moment.
_STARTING = 8
# How long a newcomer waits for the slot of a session that is ending.
_ENDING_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Seconds: see the settings of the same names in :class:`~termrl.environment.server.config.ServeConfig`."""

    command_timeout_s: float
    max_wait_s: float
    reset_s: float
    grace_s: float
    close_s: float
    idle_s: float


class Session:
    """One environment with its lease. Made by :meth:`Sessions.open` only.

    An operation that does not come back in its time, or whose caller is cancelled, is cancelled itself; after the
    first the session is lost, and its sandbox ends. The lease is given back when the sandbox is gone.

    Attributes:
        failure: what the last operation raised, for who tells the client.
        hang_up: ends the client's connection, with a reason; set by who owns it.
    """

    def __init__(self, sessions: Sessions, environment: Environment, lease: Lease) -> None:
        self._sessions = sessions
        limits = self._limits = sessions.limits
        self._metrics = sessions.metrics
        self._environment = environment
        self._lease = lease
        self._operation: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._calls = Budgets(limits.reset_s, limits.grace_s, command_s=limits.command_timeout_s)
        self._lost: str | None = None
        self.failure: TermrlError | None = None
        self.hang_up: Callable[[str], None] | None = None
        self.last_active = time.monotonic()

    @property
    def admission(self) -> Admission:
        """What counts the slots of all sessions."""
        return self._sessions.admission

    @property
    def busy(self) -> bool:
        """Whether an operation is running."""
        return self._operation is not None and not self._operation.done()

    @property
    def ending(self) -> bool:
        """Whether its end has begun."""
        return self._ending is not None

    async def reset(self, task_id: str, *, seed: int | None, episode_id: str | None) -> Observation:
        """Start a task, as :meth:`termrl.environment.protocol.Environment.reset`.

        Raises:
            CapacityError: the task's memory does not fit beside that of the others.
            EnvironmentLostError: it did not come back in time; the session is over.
            TermrlError: the environment's own reasons.
        """
        task = self._sessions.tasks.get(task_id)
        if task is not None:
            await self._sessions.admitted("memory", lambda: self._lease.need(task.sandbox.memory_mb or 0))
            self._calls = replace(self._calls, verify_s=task.verifier_timeout_s)
        try:
            call = self._start(task_id, seed=seed, episode_id=episode_id)
            return await self._bounded("reset", self._limits.reset_s + self._limits.grace_s, call)
        finally:
            self._settle()

    async def step(self, action: Action) -> Observation:
        """Run one action, as :meth:`termrl.environment.protocol.Environment.step`.

        Raises:
            EnvironmentLostError: it did not come back in time; the session is over.
            TermrlError: ``wait_seconds`` is over the server's bound, or the environment's own reasons.
        """
        most = self._limits.max_wait_s
        if action.wait_seconds is not None and action.wait_seconds > most:
            why = f"wait_seconds {action.wait_seconds:g} is over this server's {most:g}"
            raise TermrlError(why, hint="--max-wait-s raises it")
        try:
            call = self._environment.step(action)
            observation = await self._bounded(action.action_type, self._calls.of(action), call)
        finally:
            self._settle()
        if action.action_type == "evaluate":
            self._metrics.verdict(observation.info.get("verdict"))
        return observation

    def state(self) -> State:
        """Where the environment stands."""
        self.last_active = time.monotonic()
        return self._environment.state()

    def end(self) -> asyncio.Task[None]:
        """Begin to end the session, whatever it is doing; the task is done when its sandbox is gone. Idempotent."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        return self._ending

    async def close(self) -> None:
        """End the session and wait for that, but not for ever: what takes longer goes on by itself."""
        done, _ = await asyncio.wait({self.end()}, timeout=self._limits.close_s)
        if not done:
            log.warning("a session's sandbox is not gone after %g s; its slot stays taken", self._limits.close_s)

    async def _end(self) -> None:
        try:
            operation = self._operation
            if operation is not None and not operation.done():
                operation.cancel()
                # the sandbox goes under the operation, which may not heed its cancellation
                await self._environment.close()
                await asyncio.wait({operation})
            await self._environment.close()
        except Exception:
            log.exception("a session's sandbox could not be ended; its slot stays taken")
            return
        self._lease.release()
        self._sessions.forget(self)

    async def _bounded(self, name: str, seconds: float, call: Coroutine[Any, Any, T]) -> T:
        if self._lost is not None or self._ending is not None or self.busy:
            call.close()
            raise EnvironmentLostError(self._lost or "the session has ended", hint="open another")
        operation = self._operation = asyncio.ensure_future(call)
        started = self.last_active = time.monotonic()
        try:
            done, _ = await asyncio.wait({operation}, timeout=seconds)
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            self.last_active = time.monotonic()
            self._metrics.operation(name, self.last_active - started)
        if not done:
            self._lost = f"{name} did not come back in {seconds:g} s: the session is over"
            log.error(self._lost)
            self.end()
            raise EnvironmentLostError(self._lost, hint="open another session")
        return operation.result()

    async def _start(self, task_id: str, **arguments: Any) -> Observation:
        async with self._sessions.starting:
            return await self._environment.reset(task_id, **arguments)

    def _settle(self) -> None:
        """No sandbox, no memory."""
        if self._ending is None and not self.busy and not self._environment.state().terminal_ready:
            self._lease.need(0)


class Sessions:
    """Every session of the server: admits, counts, reaps and ends them.

    Args:
        tasks: what is served, by id.
        make: makes the environment of a session.
        default_task_id: the task of a reset that names none.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        make: Callable[[], Environment],
        *,
        admission: Admission,
        limits: Limits,
        metrics: ServerMetrics,
        backend: str,
        default_task_id: str,
    ) -> None:
        self.tasks = tasks
        self.admission = admission
        self.limits = limits
        self.metrics = metrics
        self.backend = backend
        self.default_task_id = default_task_id
        self.starting = asyncio.Semaphore(_STARTING)
        self._make = make
        self._live: set[Session] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._live)

    async def open(self) -> Session:
        """A session with a slot; its sandbox starts with the first reset.

        Raises:
            CapacityError: there is no slot and none is about to be free, or the server ends.
        """
        if self._closed:
            raise CapacityError("the server is ending")
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().create_task(self._reap())
        lease = await self.admitted("sessions", self.admission.lease)
        session = Session(self, self._make(), lease)
        self._live.add(session)
        return session

    async def admitted(self, by: str, ask: Callable[[], T]) -> T:
        """What ``ask`` gives, as soon as it does while sessions are ending: a client that closed one may open the next.

        Raises:
            CapacityError: that of ``ask``, when no session has ended in time.
        """
        give_up = time.monotonic() + _ENDING_S
        while True:
            try:
                return ask()
            except CapacityError:
                ending = {session.end() for session in self._live if session.ending}
                left = give_up - time.monotonic()
                if not ending or left <= 0:
                    self.admission.refused[by] += 1
                    raise
            await asyncio.wait(ending, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def forget(self, session: Session) -> None:
        """A session has ended."""
        self._live.discard(session)

    async def close(self) -> None:
        """Admit nobody any more, end every session, and wait for that as long as a session's end may take."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
        if ending := {session.end() for session in list(self._live)}:
            await asyncio.wait(ending, timeout=self.limits.close_s)

    async def _reap(self) -> None:
        idle_s = self.limits.idle_s
        while True:
            await asyncio.sleep(min(idle_s / 4, _MAX_LOOK_S))
            long_ago = time.monotonic() - idle_s
            for session in list(self._live):
                if not session.busy and session.last_active < long_ago:
                    self.metrics.reaped.inc()
                    session.end()
                    if session.hang_up is not None:
                        session.hang_up(f"nothing was asked for {idle_s:g} s")
