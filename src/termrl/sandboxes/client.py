"""One bubblewrap sandbox, as seen from its provider's process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from termrl.errors import SandboxLostError
from termrl.sandboxes import archive, layout
from termrl.sandboxes.base import DEFAULT_OUTPUT_LIMIT, Census, ChangedFiles, ExecResult, Sandbox, SandboxSpec
from termrl.sandboxes.cgroups import Group
from termrl.sandboxes.line import Line, empty, fill_tests

_STOP_S = 5.0


class Keeper(Protocol):
    """What a sandbox asks of its provider."""

    def kill(self, name: str) -> None:
        """Kill a sandbox's bubblewrap from outside."""

    def forget(self, name: str) -> None:
        """A sandbox has ended."""


class ResidentSandbox(Sandbox):
    """One live sandbox. Made by :meth:`BubblewrapProvider.create` only."""

    def __init__(self, keeper: Keeper, spec: SandboxSpec, name: str, folder: Path) -> None:
        self.id = name
        self.spec = spec
        self._keeper = keeper
        self._folder = folder
        self._group: Group | None = None
        self._joining: asyncio.Task[None] | None = None
        self._ooms = 0
        self._line = Line(f"sandbox {name} of task {spec.task_id}", itertools.count(1))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.Task[None] | None = None

    # -- the interface -------------------------------------------------------------------------------------------

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
        variables = {**layout.BASE_ENV, **({} if clean_env else self.spec.env), **(env or {})}
        await self._joined()
        self._check()
        where = cwd or self.workdir
        result = await self._line.exec(command, variables, where, timeout_s=timeout_s, output_limit=output_limit)
        return dataclasses.replace(result, oom=True) if self._new_oom() else result

    async def put(self, source: Path, target: str, *, exclude: frozenset[str] = frozenset()) -> None:
        self._check()
        await self._line.put(source, target, exclude=exclude)

    async def put_bytes(self, data: bytes, target: str, *, mode: int = 0o644) -> None:
        self._check()
        await self._line.put_bytes(data, target, mode=mode)

    async def get_bytes(self, source: str, *, max_bytes: int) -> bytes:
        self._check()
        return await self._line.get_bytes(source, max_bytes=max_bytes)

    async def get(self, source: str, target: Path) -> None:
        self._check()
        await self._line.get(source, target)

    async def kill_all(self) -> int:
        self._check()
        return await self._line.kill_all()

    async def census(self) -> Census:
        return await self._line.census()

    async def changes(
        self, since: float, *, folders: Sequence[str], trees: Sequence[str], names: Sequence[str]
    ) -> ChangedFiles:
        return await self._line.changes(since, self.workdir, folders=folders, trees=trees, names=names)

    async def standing_in(self, folders: Sequence[str]) -> tuple[str, ...]:
        return await self._line.standing_in(folders)

    async def remove(self, paths: Sequence[str]) -> None:
        await self._line.remove(paths)

    async def open_verify_window(self, tests: Path, *, exclude: frozenset[str] = frozenset()) -> None:
        await self.close_verify_window()
        await fill_tests(tests, self.tests, exclude=exclude)
        await self._line.fresh_verify_folder()

    async def close_verify_window(self) -> None:
        self._check()
        empty(self.tests)

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        # A cancelled caller must not leave a sandbox half stopped.
        await asyncio.shield(self._stopping)

    # -- the resident --------------------------------------------------------------------------------------------

    @property
    def tests(self) -> Path:
        """The host folder that the sandbox sees as /tests."""
        return self._folder / "tests"

    @property
    def started(self) -> asyncio.Future[None]:
        """Done when the resident has said its first word."""
        return self._line.started

    def attach(self, sock: socket.socket) -> None:
        """Listen to the resident on our end of its socket."""
        self._line.attach(sock)

    def join(self, group: Group) -> None:
        """Begin to move the first process, and so all that follow, into a cgroup, which is removed with the sandbox.

        No command runs before that is done.
        """
        self._group = group
        if self._line.peer_pid:
            move = asyncio.to_thread(group.add, self._line.peer_pid)
            self._joining = asyncio.get_running_loop().create_task(move)

    def oom_score(self) -> BinaryIO | None:
        """The first process's oom_score_adj, opened for it to use; ``None`` where this process may not."""
        if not self._line.peer_pid:
            return None
        try:
            return Path(f"/proc/{self._line.peer_pid}/oom_score_adj").open("r+b", buffering=0)
        except OSError:
            return None

    async def _joined(self) -> None:
        if self._joining is None:
            return
        try:
            await asyncio.shield(self._joining)
        except OSError as error:
            self._line.lose(f"cannot be moved into its cgroup: {error.strerror}")
            self._check()
        self._joining = None

    async def furnish(self, fields: Sequence[bytes], fds: Sequence[int]) -> None:
        """Have the resident make the file system and take the limits."""
        await self._line.setup(fields, fds)

    def end(self, why: str) -> None:
        """Bubblewrap has ended."""
        self._line.lose(why)
        if not self.ended.done():
            self.ended.set_result(None)

    def _check(self) -> None:
        lost = self._line.lost
        if lost or self._stopping is not None:
            raise SandboxLostError(f"sandbox {self.id} of task {self.spec.task_id}: {lost or 'is stopped'}")

    def _new_oom(self) -> bool:
        if self._group is None:
            return False
        before, self._ooms = self._ooms, self._group.oom_kills()
        return self._ooms > before

    async def _stop(self) -> None:
        self._line.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), _STOP_S)
        except TimeoutError:
            self._keeper.kill(self.id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.ended), _STOP_S)
        self._line.lose("is stopped")
        self._keeper.forget(self.id)
        with contextlib.suppress(OSError):
            archive.remove(os.fsencode(self._folder))
        if self._joining is not None:
            await asyncio.wait([self._joining])
            # Moving a process that has ended is no error.
            self._joining.exception()
        if self._group is not None:
            for _ in range(100):
                if self._group.remove():
                    break
                await asyncio.sleep(0.01)
