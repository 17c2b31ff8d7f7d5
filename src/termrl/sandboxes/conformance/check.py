"""A conformance check, what it is run against, and how it is run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from termrl.sandboxes.base import ExecResult, Sandbox, SandboxProvider, SandboxSpec

MEMORY_MB = 256
STORAGE_MB = 64
PIDS = 64
EXEC_S = 20.0

_SHOWN = 300


class Unmet(Exception):
    """What a check expected does not hold; the message says what was found instead."""


class NotHere(Exception):
    """A check cannot say anything on this machine or backend; the message says why."""


@dataclass(frozen=True)
class Failure:
    """Why a check failed, in one line or few."""

    message: str


def small_spec() -> SandboxSpec:
    """A host-userland spec with limits so small that they can be met in a moment."""
    return SandboxSpec(
        "conformance", host_userland=True, memory_mb=MEMORY_MB, storage_mb=STORAGE_MB, pids=PIDS, workdir="/app"
    )


@dataclass(frozen=True)
class Subject:
    """What the suite is run against.

    Attributes:
        provider: an open provider that has no other user while the suite runs.
        spec: how its sandboxes are made; a backend for images puts its image here.
        backend: the name by which :func:`termrl.sandboxes.open_provider` opens such a provider in another process;
            without it, what happens when an owner is killed is not checked.
        settings: the settings for that, values that JSON can hold.
    """

    provider: SandboxProvider
    spec: SandboxSpec = field(default_factory=small_spec)
    backend: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def sandbox(self, **changes: Any) -> AsyncIterator[Sandbox]:
        """One sandbox for the time of the block; ``changes`` are fields of the spec."""
        sandbox = await self.provider.create(replace(self.spec, **changes))
        try:
            yield sandbox
        finally:
            await sandbox.stop()


@dataclass(frozen=True)
class Check:
    """One behaviour that every backend must have.

    Attributes:
        name: what ``--check`` takes.
        section: exec, output, files, limits, isolation or leaks.
        what: the behaviour in words.
        body: the check itself; raises :class:`Unmet`, :class:`NotHere` or whatever the sandbox raises.
        within_s: seconds after which it counts as failed.
        limit: the key of :attr:`SandboxProvider.limits` that it puts to the test; skipped where that is not there.
        alone: it measures time or what this process has, so that no other check may run beside it.
    """

    name: str
    section: str
    what: str
    body: Callable[[Subject], Awaitable[None]]
    within_s: float
    limit: str | None = None
    alone: bool = False

    async def run(self, subject: Subject) -> Failure | None:
        """``None`` if the behaviour holds.

        Raises:
            NotHere: nothing can be said on this machine or backend.
        """
        if self.limit is not None and self.limit not in subject.provider.limits:
            raise NotHere(f"this backend does not bound {self.limit} on this machine")
        try:
            async with asyncio.timeout(self.within_s):
                await self.body(subject)
        except NotHere:
            raise
        except Unmet as error:
            return Failure(str(error))
        except TimeoutError:
            return Failure(f"did not end within {self.within_s:g} s")
        except Exception as error:
            return Failure(f"raised {type(error).__name__}: {error}")
        return None


@dataclass(frozen=True)
class Outcome:
    """How one check went. ``detail`` is empty when it held, else why it failed or could not be run."""

    check: Check
    state: Literal["holds", "fails", "skipped"]
    detail: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints for it."""
        check = self.check
        return {
            "name": check.name,
            "section": check.section,
            "what": check.what,
            "limit": check.limit,
            "state": self.state,
            "detail": self.detail,
            "seconds": round(self.seconds, 3),
        }


async def run_checks(subject: Subject, checks: Iterable[Check], *, at_once: int = 1) -> AsyncIterator[Outcome]:
    """Run checks and yield how each went, when it is known; none of them raises.

    Args:
        at_once: how many run beside each other, of those that may; these come first then.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(check: Check) -> Outcome:
        async with gate:
            begin = time.monotonic()
            try:
                failure = await check.run(subject)
                state, detail = ("fails", failure.message) if failure else ("holds", "")
            except NotHere as reason:
                state, detail = "skipped", str(reason)
            return Outcome(check, state, detail, time.monotonic() - begin)

    alone = list(checks)
    if at_once > 1:
        tasks = [asyncio.ensure_future(one(check)) for check in alone if not check.alone]
        alone = [check for check in alone if check.alone]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for check in alone:
        yield await one(check)


class Section:
    """The checks of one module, in the order in which they are written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checks: list[Check] = []

    def check(
        self, what: str, *, within_s: float = 30.0, limit: str | None = None, alone: bool = False
    ) -> Callable[[Callable[[Subject], Awaitable[None]]], Check]:
        """Make a check of a function; its name, with hyphens, becomes the check's."""

        def make(body: Callable[[Subject], Awaitable[None]]) -> Check:
            name = getattr(body, "__name__", "").replace("_", "-")
            made = Check(name, self.name, what, body, within_s, limit, alone)
            self.checks.append(made)
            return made

        return make


def need(holds: object, message: str) -> None:
    """Raise :class:`Unmet` with ``message`` unless it holds."""
    if not holds:
        raise Unmet(message)


def same(found: object, wanted: object, what: str) -> None:
    """Raise :class:`Unmet` unless the two are equal."""
    if found != wanted:
        raise Unmet(f"{what}: expected {_short(wanted)}, found {_short(found)}")


async def ask(sandbox: Sandbox, command: str, *, timeout_s: float = EXEC_S) -> str:
    """The output of a command that must end in time."""
    result = await sandbox.exec(command, timeout_s=timeout_s)
    need(not result.timed_out, f"{_short(command)} did not end within {timeout_s:g} s")
    return result.output


async def refused(sandbox: Sandbox, *commands: str) -> None:
    """Every one of the commands must fail."""
    for command in commands:
        result: ExecResult = await sandbox.exec(command, timeout_s=EXEC_S)
        need(result.exit_code != 0, f"{_short(command)} succeeds, with output {_short(result.output)}")


async def works(sandbox: Sandbox, after: str) -> None:
    """An ordinary pipeline must work."""
    result = await sandbox.exec("echo a | tr a b", timeout_s=EXEC_S)
    same((result.output, result.exit_code), ("b\n", 0), f"the next command after {after}")


async def python_in(sandbox: Sandbox) -> str:
    """The sandbox's Python.

    Raises:
        NotHere: it has none.
    """
    found = (await ask(sandbox, "command -v python3")).strip()
    if not found:
        raise NotHere("no python3 in the sandbox to try it with")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
