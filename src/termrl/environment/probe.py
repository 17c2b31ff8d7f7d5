"""A smoke test of any OpenEnv server: does it answer, how fast, how many sessions does it admit, and who may score.

A terminal environment (Terminal-Bench 2's wire) is told by its action schema. Of any other, an action is made up from
the schema: it need not make sense to the environment, only be answered.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from termrl.environment.client import ClientOptions, EnvClient
from termrl.environment.protocol import Action, Observation
from termrl.environment.routes import get_json
from termrl.errors import CapacityError, EnvironmentLostError
from termrl.verifier.verdict import HARNESS

USABLE, UNREACHABLE, NO_SESSION, FAILED = 0, 3, 4, 5

_DEADLINE_S = 60.0
_EVALUATE_S = 900.0
_FREE_AGAIN_S = 30.0
_MOST_MADE_UP = 20

T = TypeVar("T")


@dataclass
class Stage:
    """One thing that was tried, ``count`` times. Times are milliseconds; ``error`` is empty where all went well."""

    name: str
    error: str = ""
    note: str = ""
    times_ms: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How often it worked."""
        return len(self.times_ms)

    @property
    def median_ms(self) -> float | None:
        """Median time; ``None`` where nothing worked."""
        return statistics.median(self.times_ms) if self.times_ms else None

    @property
    def p95_ms(self) -> float | None:
        """95th percentile (nearest rank); ``None`` where nothing worked."""
        ordered = sorted(self.times_ms)
        return ordered[-(-len(ordered) * 95 // 100) - 1] if ordered else None

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        keys = ("name", "count", "median_ms", "p95_ms", "error", "note")
        return {key: getattr(self, key) for key in keys}


@dataclass
class Probe:
    """What a probe found.

    Attributes:
        kind: ``terminal``, ``other``, or ``unknown`` before the schema is read.
        admitted, refused: of the sessions that were asked for at once; ``refused`` for want of capacity.
        canonical: whether ``evaluate`` runs the task's own tests/test.sh; ``None`` where it was not asked.
        exit_code: 0 usable; 3 nobody answers; 4 no session was admitted; 5 something did not work.
    """

    url: str
    kind: str = "unknown"
    stages: list[Stage] = field(default_factory=list)
    sessions: int = 0
    admitted: int = 0
    refused: int = 0
    canonical: bool | None = None
    exit_code: int = USABLE

    @property
    def failed(self) -> Stage | None:
        """The first stage that did not work."""
        return next((stage for stage in self.stages if stage.error), None)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        failed = self.failed
        keys = ("url", "kind", "exit_code", "sessions", "admitted", "refused", "canonical")
        return {
            **{key: getattr(self, key) for key in keys},
            "usable": self.exit_code == USABLE,
            "failed": None if failed is None else failed.name,
            "stages": [stage.as_json() for stage in self.stages],
        }


async def probe(
    url: str, *, options: ClientOptions | None = None, task_id: str | None = None, sessions: int = 8, rounds: int = 20
) -> Probe:
    """Try everything once, the steps ``rounds`` times, and ``sessions`` sessions at once. Closes all it opens.

    Raises:
        ConfigError: the URL is none, or the server refuses the token.
    """
    return await _Prober(url, options or ClientOptions(), task_id, sessions, rounds).run()


class _Stop(Exception):
    """A stage failed without which the rest cannot be tried."""


class _Prober:
    def __init__(self, url: str, options: ClientOptions, task_id: str | None, sessions: int, rounds: int) -> None:
        self._url, self._options, self._task_id = url, options, task_id
        self._rounds = rounds
        self._actions: dict[str, Any] = {}
        self.found = Probe(url, sessions=sessions)

    async def run(self) -> Probe:
        found = self.found
        try:
            await self._routes()
            await self._one_session()
            await self._many()
        except _Stop:
            pass
        if found.exit_code == USABLE and found.failed is not None:
            found.exit_code = FAILED
        return found

    async def _routes(self) -> None:
        address = EnvClient(self._url, self._options).address
        health, schema = Stage("health"), Stage("schema")
        answer = await self._time(health, lambda: get_json(address, "/health", token=self._options.token))
        if health.error:
            self._stop(health, UNREACHABLE)
        status = answer.get("status") if isinstance(answer, dict) else None
        health.note = f"status {status}" if status else "no /health"
        if status not in (None, "healthy", "ok"):
            health.error = f"status {str(status)[:80]}"
        self.found.stages.append(health)
        answer = await self._time(schema, lambda: get_json(address, "/schema", token=self._options.token))
        action = answer.get("action") if isinstance(answer, dict) else None
        self._actions = action if isinstance(action, dict) else {}
        if not schema.error and not self._actions:
            schema.error = "it names no action"
        fields = self._actions.get("properties") or {}
        self.found.kind = "terminal" if {"action_type", "command"} <= set(fields) else "other"
        schema.note = f"{self.found.kind}: {', '.join(list(fields)[:7])}"
        self.found.stages.append(schema)

    async def _one_session(self) -> None:
        opened, reset = Stage("open"), Stage("reset")
        client = EnvClient(self._url, self._options)
        try:
            await self._time(opened, client.connect)
            self._keep(opened, UNREACHABLE)
            await self._time(reset, lambda: self._reset(client))
            if reset.error and self.found.refused:
                self._stop(reset, NO_SESSION)
            self._keep(reset)
            await self._steps(client)
            await self._repeat(Stage("state"), client.state_raw)
            if self.found.kind == "terminal":
                await self._evaluate(client)
        finally:
            closed = Stage("close")
            await self._time(closed, client.close)
            self.found.stages.append(closed)

    async def _reset(self, client: EnvClient) -> dict[str, Any]:
        try:
            data = {"task_id": self._task_id} if self._task_id else {}
            observation, _, _ = await client.reset_raw(data)
        except CapacityError:
            self.found.refused += 1
            raise
        return observation

    async def _steps(self, client: EnvClient) -> None:
        if self.found.kind == "terminal":
            await self._repeat(Stage("exec true"), lambda: self._exec(client, "true"))
            await self._repeat(Stage("exec echo"), lambda: self._exec(client, "echo termrl-probe", "termrl-probe"))
            return
        action = made_up(self._actions)
        stage = Stage("step", note=f"made up: {str(action)[:80]}")
        await self._repeat(stage, lambda: client.step_raw(action, deadline_s=_DEADLINE_S))

    async def _exec(self, client: EnvClient, command: str, expected: str = "") -> Observation:
        observation = await client.step(Action(command=command))
        if observation.error or not observation.success or expected not in observation.output:
            raise EnvironmentLostError(f"{command}: {observation.error or observation.output[:200] or 'no output'}")
        return observation

    async def _evaluate(self, client: EnvClient) -> None:
        stage = Stage("evaluate")
        answer = await self._time(stage, lambda: client.step(Action(action_type="evaluate"), deadline_s=_EVALUATE_S))
        if answer is not None:
            self.found.canonical = answer.info.get("harness") == HARNESS
            stage.note = _verdict(answer)
        self.found.stages.append(stage)

    async def _many(self) -> None:
        """So many sessions at once, each reset; then one more, once all are closed: slots must come back."""
        found, stage = self.found, Stage("sessions at once")
        clients = [EnvClient(self._url, self._options) for _ in range(found.sessions)]

        async def one(client: EnvClient) -> None:
            began = time.monotonic()
            try:
                await client.connect()
                await self._reset(client)
            except CapacityError:
                return
            except EnvironmentLostError as error:
                stage.error = error.message
                return
            found.admitted += 1
            stage.times_ms.append((time.monotonic() - began) * 1e3)

        try:
            await asyncio.gather(*(one(client) for client in clients))
        finally:
            await asyncio.gather(*(client.close() for client in clients))
        stage.note = f"{found.admitted} of {found.sessions} admitted, {found.refused} refused for capacity"
        found.stages.append(stage)
        if found.sessions and not found.admitted and not stage.error:
            stage.error = "no session was admitted"
            found.exit_code = NO_SESSION
        if found.sessions:
            await self._free_again()

    async def _free_again(self) -> None:
        stage = Stage("slots come back")

        async def again() -> None:
            async with asyncio.timeout(_FREE_AGAIN_S):
                while True:
                    client = EnvClient(self._url, self._options)
                    try:
                        await client.connect()
                        await client.reset_raw({"task_id": self._task_id} if self._task_id else {})
                        return
                    except CapacityError:
                        await asyncio.sleep(0.1)
                    finally:
                        await client.close()

        await self._time(stage, again)
        self.found.stages.append(stage)

    async def _repeat(self, stage: Stage, call: Callable[[], Awaitable[object]]) -> None:
        for _ in range(self._rounds):
            await self._time(stage, call)
            if stage.error:
                break
        self._keep(stage)

    async def _time(self, stage: Stage, call: Callable[[], Awaitable[T]]) -> T | None:
        """Await ``call`` and keep its time, or why it failed."""
        began = time.perf_counter()
        try:
            answer = await call()
        except (EnvironmentLostError, CapacityError) as error:
            stage.error = error.message
        except TimeoutError:
            stage.error = "no answer in time"
        else:
            stage.times_ms.append((time.perf_counter() - began) * 1e3)
            return answer
        return None

    def _keep(self, stage: Stage, exit_code: int = FAILED) -> None:
        if stage.error:
            self._stop(stage, exit_code)
        self.found.stages.append(stage)

    def _stop(self, stage: Stage, exit_code: int) -> None:
        self.found.stages.append(stage)
        self.found.exit_code = exit_code
        raise _Stop


def made_up(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An action that a JSON schema allows: every required field, with the plainest value of its type."""
    fields = schema.get("properties") or {}
    required = [name for name in schema.get("required") or () if name in fields]
    definitions = schema.get("$defs") or {}
    return {name: _plainest(fields[name], definitions, depth=0) for name in required[:_MOST_MADE_UP]}


def _plainest(schema: Mapping[str, Any], definitions: Mapping[str, Any], *, depth: int) -> Any:
    if "default" in schema:
        return schema["default"]
    for key in ("const", "enum", "examples"):
        if schema.get(key):
            return schema[key] if key == "const" else schema[key][0]
    if depth > 4:
        return None
    reference = str(schema.get("$ref", "")).rpartition("/")[2]
    if reference in definitions:
        return _plainest(definitions[reference], definitions, depth=depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _plainest(schema[key][0], definitions, depth=depth + 1)
    match schema.get("type"):
        case "string":
            return "termrl probe".ljust(int(schema.get("minLength", 0)))
        case "integer" | "number":
            return schema.get("minimum", 0)
        case "boolean":
            return False
        case "array":
            items = schema.get("items") or {}
            return [_plainest(items, definitions, depth=depth + 1)] * int(schema.get("minItems", 0))
        case "object":
            fields = schema.get("properties") or {}
            names = [name for name in schema.get("required") or () if name in fields][:_MOST_MADE_UP]
            return {name: _plainest(fields[name], definitions, depth=depth + 1) for name in names}
        case _:
            return None


def _verdict(answer: Observation) -> str:
    harness = answer.info.get("harness")
    if harness != HARNESS:
        return f"not canonical: scored by {harness!r}, so the adapter would score (fidelity = adapter)"
    return f"canonical: {'no verdict: ' + answer.error if answer.reward is None else f'reward {answer.reward:g}'}"
