"""The asyncio side of a sandbox's resident: each request is a packet, each answer a future.

Nothing here blocks, and no thread or process is made for a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from termrl.errors import CommandError, SandboxLostError, TaskError
from termrl.sandboxes import archive, layout
from termrl.sandboxes.answers import changes_request, read_census, read_changes
from termrl.sandboxes.base import DEFAULT_OUTPUT_LIMIT, Census, ChangedFiles, ExecResult, Sandbox, SandboxSpec
from termrl.sandboxes.cgroups import Group
from termrl.sandboxes.channel import Channel
from termrl.sandboxes.output import render

START_S = 30.0
_INLINE = 60_000
_STOP_S = 5.0
_FILES_S = 120.0
_GRACE_S = 15.0
_MAX_GET = 1 << 30


class Keeper(Protocol):
    """What a sandbox asks of its provider."""

    def kill(self, name: str) -> None:
        """Kill a sandbox's bubblewrap from outside."""

    def forget(self, name: str) -> None:
        """A sandbox has ended."""


# The fields of the resident's answer, and the data that came before it.
_Answer = tuple[list[bytes], bytes]


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
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[_Answer]] = {}
        self._parts: dict[int, bytearray] = {}
        self._lost: str | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.Task[None] | None = None
        self._channel: Channel | None = None

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
        entries = [os.fsencode(f"{key}={value}") for key, value in variables.items()]
        text = command.encode("utf-8", "surrogateescape")
        where = os.fsencode(cwd or self.workdir)
        if b"\0" in text or b"\0" in where or any(b"\0" in entry for entry in entries):
            raise CommandError("the command holds a NUL byte", hint="a shell command cannot hold one")
        fields = [f"{timeout_s:.6f}".encode(), str(output_limit).encode(), where, str(len(entries)).encode(), *entries]
        number = next(self._numbers)
        await self._joined()
        with contextlib.ExitStack() as held:
            fds = []
            if len(text) + sum(map(len, entries)) > _INLINE:
                fds = [held.enter_context(_memory_file(text)).fileno()]
                text = b""
            try:
                answer, kept = await self._ask(b"exec", [*fields, text], fds, timeout_s + _GRACE_S, number)
            except asyncio.CancelledError:
                self._send(b"cancel", number, [])
                raise
        code, timed_out, total, head_bytes, duration, background, oom = answer
        cut = int(head_bytes)
        output, missing = render(kept[:cut], kept[cut:], int(total))
        return ExecResult(
            output=output,
            exit_code=int(code) if code else None,
            timed_out=timed_out == b"1",
            truncated_bytes=missing,
            duration_s=float(duration),
            background=int(background),
            oom=oom == b"1" or self._new_oom(),
        )

    async def put(self, source: Path, target: str, *, exclude: frozenset[str] = frozenset()) -> None:
        with contextlib.closing(await packed(source, exclude)) as stream:
            await self._ask(b"put", [_absolute(target)], [stream.fileno()], _FILES_S)

    async def put_bytes(self, data: bytes, target: str, *, mode: int = 0o644) -> None:
        with _memory_file(data) as stream:
            await self._ask(b"write", [_absolute(target), str(mode).encode()], [stream.fileno()], _FILES_S)

    async def get_bytes(self, source: str, *, max_bytes: int) -> bytes:
        return (await self._ask(b"read", [_absolute(source), str(max_bytes).encode()], [], _FILES_S))[1]

    async def get(self, source: str, target: Path) -> None:
        with _memory_file(b"") as stream:
            await self._ask(b"get", [_absolute(source), str(_MAX_GET).encode()], [stream.fileno()], _FILES_S)
            if target.is_symlink():
                raise ValueError(f"{target}: is a link")
            try:
                await asyncio.to_thread(archive.unpack, stream.fileno(), os.fsencode(target))
            except archive.ArchiveError as error:
                raise ValueError(f"{source}: {error}") from error

    async def kill_all(self) -> int:
        (count,), _ = await self._ask(b"killall", [], [], _GRACE_S)
        return int(count)

    async def census(self) -> Census:
        return read_census((await self._ask(b"census", [], [], _FILES_S))[1])

    async def changes(
        self, since: float, *, folders: Sequence[str], trees: Sequence[str], names: Sequence[str]
    ) -> ChangedFiles:
        fields = changes_request(since, self.workdir, names, folders, trees)
        return read_changes((await self._ask(b"changes", fields, [], _FILES_S))[1])

    async def open_verify_window(self, tests: Path, *, exclude: frozenset[str] = frozenset()) -> None:
        await self.close_verify_window()
        with contextlib.closing(await packed(tests, exclude)) as stream:
            await asyncio.to_thread(_fill, stream.fileno(), self.tests)
        await self._ask(b"verify", [], [], _FILES_S)

    async def close_verify_window(self) -> None:
        self._check()
        for entry in self.tests.iterdir():
            archive.remove(os.fsencode(entry))

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

    def attach(self, sock: socket.socket) -> None:
        """Listen to the resident on our end of its socket."""
        self._channel = Channel(sock, self._packet, self._gone, max_splits=2)

    def join(self, group: Group) -> None:
        """Begin to move the first process, and so all that follow, into a cgroup, which is removed with the sandbox.

        No command runs before that is done.
        """
        self._group = group
        if self._channel is not None and self._channel.peer_pid:
            move = asyncio.to_thread(group.add, self._channel.peer_pid)
            self._joining = asyncio.get_running_loop().create_task(move)

    def oom_score(self) -> BinaryIO | None:
        """The first process's oom_score_adj, opened for it to use; ``None`` where this process may not."""
        if self._channel is None or not self._channel.peer_pid:
            return None
        try:
            return Path(f"/proc/{self._channel.peer_pid}/oom_score_adj").open("r+b", buffering=0)
        except OSError:
            return None

    async def _joined(self) -> None:
        if self._joining is None:
            return
        try:
            await asyncio.shield(self._joining)
        except OSError as error:
            self._lose(f"cannot be moved into its cgroup: {error.strerror}")
            self._check()
        self._joining = None

    async def furnish(self, fields: Sequence[bytes], fds: Sequence[int]) -> None:
        """Have the resident make the file system and take the limits."""
        await self._ask(b"setup", fields, fds, START_S)

    def end(self, why: str) -> None:
        """Bubblewrap has ended."""
        self._lose(why)
        if not self.ended.done():
            self.ended.set_result(None)

    def _lose(self, why: str) -> None:
        """Nothing that still waits can be answered."""
        self._lost = self._lost or why
        error = SandboxLostError(f"sandbox {self.id} of task {self.spec.task_id}: {self._lost}")
        for waiter in (self.started, *self._answers.values()):
            if not waiter.done():
                waiter.set_exception(error)
                # It may be that nobody waits for it.
                waiter.exception()
        self._answers.clear()

    async def _ask(
        self, verb: bytes, fields: Sequence[bytes], fds: Sequence[int], timeout_s: float, number: int | None = None
    ) -> _Answer:
        self._check()
        number = next(self._numbers) if number is None else number
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(verb, number, fields, fds)
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            self._lose(f"no answer to {verb.decode()} in {timeout_s:.0f} s")
            self._check()
            raise
        finally:
            self._answers.pop(number, None)
            self._parts.pop(number, None)

    def _send(self, verb: bytes, number: int, fields: Sequence[bytes], fds: Sequence[int] = ()) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send([verb, str(number).encode(), *fields], fds)
        except OSError as error:
            raise CommandError(f"{verb.decode()}: the request is too large ({error.strerror})") from error

    def _packet(self, fields: list[bytes]) -> None:
        if fields[0] == b"hello":
            if not self.started.done():
                self.started.set_result(None)
            return
        verb, ident, rest = (*fields, b"")[:3]
        number = int(ident)
        answer = self._answers.get(number)
        if answer is None or answer.done():
            self._parts.pop(number, None)
        elif verb == b"out":
            self._parts.setdefault(number, bytearray()).extend(rest)
        elif verb in (b"ok", b"done"):
            answer.set_result((rest.split(b"\0"), bytes(self._parts.pop(number, b""))))
        elif verb == b"err":
            kind, _, message = rest.partition(b"\0")
            answer.set_exception(_error(kind, message.decode("utf-8", "replace")))

    def _gone(self) -> None:
        # The launcher says in a moment how it ended; do not wait for that for ever.
        asyncio.get_running_loop().call_later(1.0, self._lose, "its first process ended")

    def _check(self) -> None:
        if self._lost or self._stopping is not None:
            raise SandboxLostError(f"sandbox {self.id} of task {self.spec.task_id}: {self._lost or 'is stopped'}")

    def _new_oom(self) -> bool:
        if self._group is None:
            return False
        before, self._ooms = self._ooms, self._group.oom_kills()
        return self._ooms > before

    async def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), _STOP_S)
        except TimeoutError:
            self._keeper.kill(self.id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.ended), _STOP_S)
        self._lose("is stopped")
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


def _error(kind: bytes, message: str) -> Exception:
    if kind == b"missing":
        return FileNotFoundError(message)
    if kind == b"value":
        return ValueError(message)
    return CommandError(message)


def _absolute(path: str) -> bytes:
    if not path.startswith("/") or "\0" in path:
        raise CommandError(f"{path!r}: must be an absolute path in the sandbox")
    return os.fsencode(path)


def _memory_file(data: bytes) -> BinaryIO:
    stream = os.fdopen(os.memfd_create("termrl", os.MFD_CLOEXEC), "w+b", buffering=0)
    view = memoryview(data)
    while view:
        view = view[stream.write(view) or 0 :]
    return stream


async def packed(source: Path, exclude: frozenset[str]) -> BinaryIO:
    """A file or folder of this machine as a stream in memory; ``exclude`` holds paths relative to it.

    Raises:
        TaskError: it holds what cannot be put into a sandbox.
        OSError: it cannot be read.
    """
    stream = _memory_file(b"")
    left_out = frozenset(os.fsencode(name) for name in exclude)
    try:
        await asyncio.to_thread(archive.pack, os.fsencode(source), stream.fileno(), exclude=left_out)
    except archive.ArchiveError as error:
        stream.close()
        raise TaskError(f"{source}: {error}") from error
    except BaseException:
        stream.close()
        raise
    return stream


def _fill(stream: int, folder: Path) -> None:
    """Unpack into a host folder that the sandboxes' user must be able to read."""
    archive.unpack(stream, os.fsencode(folder))
    if os.geteuid() != 0:
        return
    for path in folder.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o444 | (0o111 if path.is_dir() or mode & 0o100 else 0))
