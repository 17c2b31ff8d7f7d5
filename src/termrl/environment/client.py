"""A thin client of OpenEnv's WebSocket: one connection is one session, one request at a time, nothing done in silence.

The protocol has no request ids, so an answer that comes after its deadline could be taken for the next one's: a call
that is given up (by its deadline or by its caller) closes the connection, and a closed one is never opened again
behind the caller's back. It needs ``websockets`` and ``pydantic``, not ``openenv``.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine
from typing import Any, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from termrl.environment.address import Address
from termrl.environment.budgets import Budgets
from termrl.environment.connection import CLOSE_S, ClientOptions, Connection, shown
from termrl.environment.protocol import Action, Observation, State
from termrl.errors import CapacityError, EnvironmentLostError

__all__ = ["ClientOptions", "EnvClient", "RawStep", "SyncEnvClient"]

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0

RawStep: TypeAlias = tuple[dict[str, Any], float | None, bool]
"""(observation, reward, done) as they came."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class EnvClient:
    """One session on an OpenEnv server, for one task at a time. ``async with EnvClient(url) as client`` connects.

    Every call raises :class:`~termrl.errors.EnvironmentLostError` or one of its kinds:
    :class:`~termrl.errors.ServerError` (a coded answer; the session goes on), :class:`~termrl.errors.DeadlineError`,
    :class:`~termrl.errors.ProtocolError`. After any but the first the connection is closed for good. The first call
    of a session raises :class:`~termrl.errors.CapacityError` when no slot came free in time.
    """

    def __init__(self, url: str, options: ClientOptions | None = None) -> None:
        """Make a client; nothing is opened yet.

        Raises:
            ConfigError: the URL is none of an OpenEnv server, or holds credentials.
        """
        self.address = Address.of(url)
        self.options = options or ClientOptions()
        self.budgets = self.options.budgets
        self.waited_s = 0.0
        self._connection: Connection | None = None
        self._full: CapacityError | None = None

    @property
    def connected(self) -> bool:
        """Whether calls can be made."""
        return self._connection is not None and self._connection.lost is None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Open the connection. Whether the server has a slot is known only after the first call.

        Raises:
            EnvironmentLostError: nobody answers there, or not as an OpenEnv server; or this client was connected
                before (a new session needs a new client).
            ConfigError: the server refuses the token, or this client.
        """
        if self._connection is not None or self._full is not None:
            raise EnvironmentLostError("this client was connected before; a new session needs a new client")
        await self._open()

    async def reset(
        self, task_id: str | None = None, *, seed: int | None = None, episode_id: str | None = None, **extra: Any
    ) -> Observation:
        """Start an episode. Arguments that are ``None`` are not sent; ``extra`` goes along as it is.

        The budgets in the observation's ``info`` become those of later calls.
        """
        named = {"task_id": task_id, "seed": seed, "episode_id": episode_id}
        data = {name: value for name, value in named.items() if value is not None} | extra
        observation = await self._observed({"type": "reset", "data": data}, self.budgets.reset_s + self.budgets.grace_s)
        self._check_kind(observation, "reset")
        self.budgets = self.options.budgets.told(observation.info)
        return observation

    async def step(self, action: Action, *, deadline_s: float | None = None) -> Observation:
        """Run one action of a terminal environment.

        Raises:
            CommandError: the action is larger than the protocol's frames; it was not sent.
        """
        message = {"type": "step", "data": action.model_dump(mode="json")}
        observation = await self._observed(message, deadline_s or self.budgets.of(action))
        self._check_kind(observation, action.action_type)
        return observation

    async def reset_raw(self, data: dict[str, Any], *, deadline_s: float | None = None) -> RawStep:
        """Start an episode of any environment; returns (observation, reward, done)."""
        return await self._raw(
            {"type": "reset", "data": data}, deadline_s or self.budgets.reset_s + self.budgets.grace_s
        )

    async def step_raw(self, data: dict[str, Any], *, deadline_s: float | None = None) -> RawStep:
        """Run one action of any environment; returns (observation, reward, done)."""
        return await self._raw({"type": "step", "data": data}, deadline_s or self.budgets.of(Action()))

    async def state(self) -> State:
        """Where the session stands."""
        return self._model(State, await self.state_raw())

    async def state_raw(self) -> dict[str, Any]:
        """The state of any environment."""
        return await self._call({"type": "state"}, "state", self.budgets.of(Action()))

    async def close(self) -> None:
        """Say goodbye and close, within seconds, whatever the server does. Idempotent."""
        if self._connection is not None:
            await self._connection.close()

    async def _raw(self, message: dict[str, Any], deadline_s: float) -> RawStep:
        data = await self._call(message, "observation", deadline_s)
        observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
        number = reward is None or isinstance(reward, int | float)
        if not isinstance(observation, dict) or not number or not isinstance(done, bool):
            raise self._broken(f"an observation is not what the protocol says: {shown(data)}")
        return observation, None if reward is None else float(reward), done

    async def _observed(self, message: dict[str, Any], deadline_s: float) -> Observation:
        observation, reward, done = await self._raw(message, deadline_s)
        return self._model(Observation, {**observation, "reward": reward, "done": done})

    def _model(self, model: type[M], data: dict[str, Any]) -> M:
        try:
            return model.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self._broken(f"not a terminal environment's {model.__name__}: {where}: {first['msg']}") from None

    def _check_kind(self, observation: Observation, expected: str) -> None:
        if observation.action_type not in ("", expected):
            raise self._broken(f"the answer to {expected!r} is one to {observation.action_type[:40]!r}")

    def _broken(self, why: str) -> Exception:
        return self._connection.broken(why) if self._connection is not None else EnvironmentLostError(why)

    async def _call(self, message: dict[str, Any], expected: str, deadline_s: float) -> dict[str, Any]:
        """Ask once; in a session that has not begun, wait for a slot as long as the options say."""
        started, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            connection = self._connection
            try:
                if self._full is not None:
                    raise self._full
                if connection is None:
                    raise EnvironmentLostError("the client is not connected")
                return await connection.ask(message, expected, deadline_s)
            except CapacityError as error:
                error.waited_s = self.waited_s = time.monotonic() - started
                left = self.options.capacity_wait_s - self.waited_s
                if left <= 0 or (connection is not None and connection.in_session):
                    raise
            if connection is not None:
                await connection.close()
            await asyncio.sleep(min(random.uniform(0.5, 1.0) * pause_s, left))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            await self._open()
            self.waited_s = time.monotonic() - started

    async def _open(self) -> None:
        self._connection = self._full = None
        try:
            self._connection = await Connection.open(self.address, self.options)
        except CapacityError as error:
            self._full = error


class SyncEnvClient:
    """:class:`EnvClient` for code without an event loop: a thread of its own keeps the connection alive."""

    def __init__(self, url: str, options: ClientOptions | None = None) -> None:
        """Make a client; nothing is opened yet. Raises as :class:`EnvClient`."""
        self._client = EnvClient(url, options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()

    @property
    def budgets(self) -> Budgets:
        """What calls may take."""
        return self._client.budgets

    @property
    def waited_s(self) -> float:
        """Seconds that the first call waited for a slot."""
        return self._client.waited_s

    def connect(self) -> None:
        """As :meth:`EnvClient.connect`."""
        first = self._loop is None
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="termrl-env-client", daemon=True)
            self._thread.start()
        try:
            self._run(self._client.connect())
        except BaseException:
            if first:
                self.close()
            raise

    def reset(
        self, task_id: str | None = None, *, seed: int | None = None, episode_id: str | None = None, **extra: Any
    ) -> Observation:
        """As :meth:`EnvClient.reset`."""
        return self._run(self._client.reset(task_id, seed=seed, episode_id=episode_id, **extra))

    def step(self, action: Action, *, deadline_s: float | None = None) -> Observation:
        """As :meth:`EnvClient.step`."""
        return self._run(self._client.step(action, deadline_s=deadline_s))

    def reset_raw(self, data: dict[str, Any], *, deadline_s: float | None = None) -> RawStep:
        """As :meth:`EnvClient.reset_raw`."""
        return self._run(self._client.reset_raw(data, deadline_s=deadline_s))

    def step_raw(self, data: dict[str, Any], *, deadline_s: float | None = None) -> RawStep:
        """As :meth:`EnvClient.step_raw`."""
        return self._run(self._client.step_raw(data, deadline_s=deadline_s))

    def state(self) -> State:
        """As :meth:`EnvClient.state`."""
        return self._run(self._client.state())

    def state_raw(self) -> dict[str, Any]:
        """As :meth:`EnvClient.state_raw`."""
        return self._run(self._client.state_raw())

    def close(self) -> None:
        """As :meth:`EnvClient.close`; the thread ends too."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._run(self._client.close())
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_S)
        if not thread.is_alive():
            loop.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            call.close()
            raise EnvironmentLostError("the client is not connected")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
