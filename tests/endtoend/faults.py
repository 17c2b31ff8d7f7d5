"""Infrastructure that fails, around the real one: sandboxes that do not start, that die, whose tests crash."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from termrl.errors import SandboxStartError
from termrl.sandboxes import open_provider
from termrl.sandboxes.base import (
    DEFAULT_OUTPUT_LIMIT,
    Census,
    ChangedFiles,
    ExecResult,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
)
from termrl.sandboxes.bubblewrap import BubblewrapProvider
from termrl.verifier.verdict import Cause

KINDS = (Cause.SANDBOX_START, Cause.SANDBOX_LOST, Cause.VERIFIER_CRASH)


class FaultyProvider(SandboxProvider):
    """Injects a fault into a share of the sandboxes of ``inner``, each kind as often, drawn from ``seed``.

    - ``sandbox_start``: the sandbox is not made.
    - ``sandbox_lost``: its bubblewrap is killed before one of the first commands, or before the tests at the latest.
    - ``verifier_crash``: the tests are killed whenever they run, in this sandbox and in the next one of its task.
    """

    name = "faulty"

    def __init__(self, inner: BubblewrapProvider, *, rate: float, seed: int) -> None:
        self._inner = inner
        self._rate = rate
        self._random = random.Random(seed)
        self._untouched: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()

    @property
    def live(self) -> int:
        return self._inner.live

    def refusal(self, spec: SandboxSpec) -> str | None:
        return self._inner.refusal(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if self._untouched[spec.task_id]:
            self._untouched[spec.task_id] -= 1
            return _FaultySandbox(await self._inner.create(spec), crashes=True)
        if self._random.random() >= self._rate:
            return await self._inner.create(spec)
        kind = self._random.choice(KINDS)
        self.injected[kind] += 1
        if kind is Cause.SANDBOX_START:
            raise SandboxStartError(f"{spec.task_id}: no sandbox today")
        sandbox = await self._inner.create(spec)
        if kind is Cause.SANDBOX_LOST:
            return _FaultySandbox(
                sandbox, kill=lambda: self._inner.kill(sandbox.id), commands=self._random.randrange(2)
            )
        return _FaultySandbox(sandbox, crashes=True, stopped=lambda: self._untouched.update([spec.task_id]))

    async def close(self) -> None:
        await self._inner.close()


class _FaultySandbox(Sandbox):
    def __init__(
        self,
        inner: Sandbox,
        *,
        kill: Callable[[], None] | None = None,
        commands: int = 0,
        crashes: bool = False,
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self.id, self.spec = inner.id, inner.spec
        self._inner = inner
        self._kill = kill
        self._commands = commands
        self._crashes = crashes
        self._stopped = stopped

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        clean_env: bool = False,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> ExecResult:
        if self._kill is not None:
            if self._commands == 0:
                self._kill()
                command = "sleep 60"  # it dies under the command, not before it
            self._commands -= 1
        if self._crashes and clean_env:
            return ExecResult(output="", exit_code=137)
        return await self._inner.exec(
            command, timeout_s=timeout_s, cwd=cwd, env=env, clean_env=clean_env, output_limit=output_limit
        )

    async def census(self) -> Census:
        return await self._inner.census()

    async def changes(
        self, since: float, *, folders: Sequence[str], trees: Sequence[str], names: Sequence[str]
    ) -> ChangedFiles:
        return await self._inner.changes(since, folders=folders, trees=trees, names=names)

    async def standing_in(self, folders: Sequence[str]) -> tuple[str, ...]:
        return await self._inner.standing_in(folders)

    async def remove(self, paths: Sequence[str]) -> None:
        await self._inner.remove(paths)

    async def put(self, source: Path, target: str, *, exclude: frozenset[str] = frozenset()) -> None:
        await self._inner.put(source, target, exclude=exclude)

    async def put_bytes(self, data: bytes, target: str, *, mode: int = 0o644) -> None:
        await self._inner.put_bytes(data, target, mode=mode)

    async def get_bytes(self, source: str, *, max_bytes: int) -> bytes:
        return await self._inner.get_bytes(source, max_bytes=max_bytes)

    async def get(self, source: str, target: Path) -> None:
        await self._inner.get(source, target)

    async def kill_all(self) -> int:
        return await self._inner.kill_all()

    async def open_verify_window(self, tests: Path, *, exclude: frozenset[str] = frozenset()) -> None:
        if self._kill is not None:
            self._commands = 0
        await self._inner.open_verify_window(tests, exclude=exclude)

    async def close_verify_window(self) -> None:
        await self._inner.close_verify_window()

    async def stop(self) -> None:
        await self._inner.stop()
        stopped, self._stopped = self._stopped, lambda: None
        stopped()


def faulty(rate: float, seed: int, made: list[FaultyProvider]) -> Callable[..., SandboxProvider]:
    """What :func:`termrl.training.local.train` takes as ``open_sandboxes``; what it makes is added to ``made``."""

    def open_faulty(name: str, **settings: Any) -> SandboxProvider:
        inner = open_provider(name, **settings)
        assert isinstance(inner, BubblewrapProvider)
        provider = FaultyProvider(inner, rate=rate, seed=seed)
        made.append(provider)
        return provider

    return open_faulty
