"""Requests to a resident and its answers: each request is a packet, each answer a future.

Nothing here blocks, and no thread or process is made for a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from termrl.errors import CommandError, SandboxLostError, TaskError
from termrl.sandboxes import archive
from termrl.sandboxes.base import Census, ChangedFiles, ExecResult
from termrl.sandboxes.channel import Channel
from termrl.sandboxes.output import render

START_S = 30.0

_INLINE = 60_000
_FILES_S = 120.0
_GRACE_S = 15.0
_MAX_GET = 1 << 30

# The fields of the resident's answer, and the data that came before it.
Answer = tuple[list[bytes], bytes]


class Line:
    """One line to one resident, on the running event loop.

    Args:
        who: whose line it is, for messages.
        numbers: gives every request its number; the lines of one sandbox share it, because commands' process trees
            are told apart by it.
        parting_s: how long whoever started the resident may take to say how it ended.

    Attributes:
        started: done when the resident has said its first word.
        lost: why nothing can be asked any more, or ``None``.
    """

    def __init__(self, who: str, numbers: Iterator[int], *, parting_s: float = 1.0) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: str | None = None
        self._who = who
        self._numbers = numbers
        self._parting_s = parting_s
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._parts: dict[int, bytearray] = {}
        self._channel: Channel | None = None

    def attach(self, sock: socket.socket) -> None:
        """Listen to the resident on our end of its socket."""
        self._channel = Channel(sock, self._packet, self._gone, max_splits=2)

    @property
    def peer_pid(self) -> int | None:
        """The resident's process in our pid namespace; ``None`` until it has spoken."""
        return self._channel.peer_pid if self._channel is not None else None

    def close(self) -> None:
        """Hang up: the resident ends. Idempotent."""
        if self._channel is not None:
            self._channel.close()

    def lose(self, why: str) -> None:
        """Nothing that still waits can be answered."""
        self.lost = self.lost or why
        error = self._error()
        for waiter in (self.started, *self._answers.values()):
            if not waiter.done():
                waiter.set_exception(error)
                # It may be that nobody waits for it.
                waiter.exception()
        self._answers.clear()

    # -- requests ------------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        variables: Mapping[str, str],
        cwd: str,
        *,
        timeout_s: float,
        output_limit: int,
        number: int | None = None,
    ) -> ExecResult:
        """As :meth:`termrl.sandboxes.base.Sandbox.exec`, with the whole environment in ``variables``.

        Args:
            number: what its process tree is known by, drawn from the line's numbers; the next one when ``None``.
        """
        entries = [os.fsencode(f"{key}={value}") for key, value in variables.items()]
        text = command.encode("utf-8", "surrogateescape")
        where = os.fsencode(cwd)
        if b"\0" in text or b"\0" in where or any(b"\0" in entry for entry in entries):
            raise CommandError("the command holds a NUL byte", hint="a shell command cannot hold one")
        fields = [f"{timeout_s:.6f}".encode(), str(output_limit).encode(), where, str(len(entries)).encode(), *entries]
        number = next(self._numbers) if number is None else number
        with contextlib.ExitStack() as held:
            fds = []
            if len(text) + sum(map(len, entries)) > _INLINE:
                fds = [held.enter_context(memory_file(text)).fileno()]
                text = b""
            try:
                answer, kept = await self.ask(b"exec", [*fields, text], fds, timeout_s + _GRACE_S, number)
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
            oom=oom == b"1",
        )

    async def put(self, source: Path, target: str, *, exclude: frozenset[str] = frozenset()) -> None:
        """As :meth:`termrl.sandboxes.base.Sandbox.put`."""
        with contextlib.closing(await packed(source, exclude)) as stream:
            await self.ask(b"put", [absolute(target)], [stream.fileno()], _FILES_S)

    async def put_bytes(self, data: bytes, target: str, *, mode: int) -> None:
        """As :meth:`termrl.sandboxes.base.Sandbox.put_bytes`."""
        with memory_file(data) as stream:
            await self.ask(b"write", [absolute(target), str(mode).encode()], [stream.fileno()], _FILES_S)

    async def get_bytes(self, source: str, *, max_bytes: int) -> bytes:
        """As :meth:`termrl.sandboxes.base.Sandbox.get_bytes`."""
        return (await self.ask(b"read", [absolute(source), str(max_bytes).encode()], [], _FILES_S))[1]

    async def get(self, source: str, target: Path) -> None:
        """As :meth:`termrl.sandboxes.base.Sandbox.get`."""
        with memory_file(b"") as stream:
            await self.ask(b"get", [absolute(source), str(_MAX_GET).encode()], [stream.fileno()], _FILES_S)
            if target.is_symlink():
                raise ValueError(f"{target}: is a link")
            try:
                await asyncio.to_thread(archive.unpack, stream.fileno(), os.fsencode(target))
            except archive.ArchiveError as error:
                raise ValueError(f"{source}: {error}") from error

    async def kill_all(self) -> int:
        """As :meth:`termrl.sandboxes.base.Sandbox.kill_all`."""
        (count,), _ = await self.ask(b"killall", [], [], _GRACE_S)
        return int(count)

    async def census(self) -> Census:
        """As :meth:`termrl.sandboxes.base.Sandbox.census`."""
        data = (await self.ask(b"census", [], [], _FILES_S))[1]
        lines = [line.decode("utf-8", "replace") for line in data.split(b"\0")]
        names = tuple(line[2:42] for line in lines if line.startswith("p "))
        return Census(names, tuple(line[2:] for line in lines if line.startswith("l ")))

    async def changes(
        self, since: float, workdir: str, *, folders: Sequence[str], trees: Sequence[str], names: Sequence[str]
    ) -> ChangedFiles:
        """As :meth:`termrl.sandboxes.base.Sandbox.changes`."""
        lists = [b"\n".join(map(os.fsencode, each)) for each in (names, folders, trees)]
        fields = [str(int(since * 1e9)).encode(), os.fsencode(workdir.rstrip("/") or "/"), *lists]
        data = (await self.ask(b"changes", fields, [], _FILES_S))[1]
        first, *entries = data.decode("utf-8", "replace").split("\0")
        return ChangedFiles(
            paths=tuple(entry.lstrip("@%") for entry in entries if entry[:1] in ("/", "@", "%")),
            folders=frozenset(entry[1:] for entry in entries if entry.startswith("%")),
            links=frozenset(entry[1:] for entry in entries if entry.startswith("@")),
            removed_links=tuple(entry[1:] for entry in entries if entry.startswith(">")),
            complete=first == "+",
        )

    async def act_as(self, user: str | None) -> None:
        """As :meth:`termrl.sandboxes.base.Sandbox.act_as`."""
        await self.ask(b"user", [os.fsencode(user or "")], [], _FILES_S)

    async def standing_in(self, folders: Sequence[str]) -> tuple[str, ...]:
        """As :meth:`termrl.sandboxes.base.Sandbox.standing_in`."""
        data = (await self.ask(b"list", list(map(os.fsencode, folders)), [], _FILES_S))[1]
        return tuple(data.decode("utf-8", "replace").split("\0")) if data else ()

    async def remove(self, paths: Sequence[str]) -> None:
        """As :meth:`termrl.sandboxes.base.Sandbox.remove`."""
        with memory_file(b"\0".join(map(os.fsencode, paths))) as stream:
            await self.ask(b"remove", [], [stream.fileno()], _FILES_S)

    async def fresh_verify_folder(self) -> None:
        """Make an empty ``/logs/verifier``."""
        await self.ask(b"verify", [], [], _FILES_S)

    async def setup(self, fields: Sequence[bytes], fds: Sequence[int]) -> list[bytes]:
        """Have the resident make the file system and take the limits; what it answers."""
        return (await self.ask(b"setup", fields, fds, START_S))[0]

    async def ask(
        self, verb: bytes, fields: Sequence[bytes], fds: Sequence[int], timeout_s: float, number: int | None = None
    ) -> Answer:
        """Send one request and await its answer; a resident that does not answer in time is lost.

        Raises:
            SandboxLostError: the resident is gone or silent.
            CommandError, FileNotFoundError, ValueError: what it answered.
        """
        if self.lost:
            raise self._error()
        number = next(self._numbers) if number is None else number
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(verb, number, fields, fds)
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            self.lose(f"no answer to {verb.decode()} in {timeout_s:.0f} s")
            raise self._error() from None
        finally:
            self._answers.pop(number, None)
            self._parts.pop(number, None)

    # -- packets -------------------------------------------------------------------------------------------------

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
            answer.set_exception(_refusal(kind, message.decode("utf-8", "replace")))

    def _gone(self) -> None:
        # Who started it says in a moment how it ended; do not wait for that for ever.
        why = "its first process ended"
        if not self._parting_s:
            self.lose(why)
        else:
            asyncio.get_running_loop().call_later(self._parting_s, self.lose, why)

    def _error(self) -> SandboxLostError:
        return SandboxLostError(f"{self._who}: {self.lost}")


def memory_file(data: bytes) -> BinaryIO:
    """A file in memory that holds ``data``; at its end."""
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
    stream = memory_file(b"")
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


async def fill_tests(source: Path, folder: Path, *, exclude: frozenset[str]) -> None:
    """Put the contents of ``source`` into the empty host folder that a sandbox sees as /tests.

    Raises:
        TaskError, OSError: as :func:`packed`.
    """
    with contextlib.closing(await packed(source, exclude)) as stream:
        await asyncio.to_thread(_fill, stream.fileno(), folder)


def empty(folder: Path) -> None:
    """Remove all that is in a host folder."""
    for entry in folder.iterdir():
        archive.remove(os.fsencode(entry))


def absolute(path: str) -> bytes:
    """``path`` as bytes.

    Raises:
        CommandError: it is not absolute.
    """
    if not path.startswith("/") or "\0" in path:
        raise CommandError(f"{path!r}: must be an absolute path in the sandbox")
    return os.fsencode(path)


def _refusal(kind: bytes, message: str) -> Exception:
    if kind == b"missing":
        return FileNotFoundError(message)
    if kind == b"value":
        return ValueError(message)
    return CommandError(message)


def _fill(stream: int, folder: Path) -> None:
    """Unpack into a host folder that the sandboxes' user must be able to read."""
    archive.unpack(stream, os.fsencode(folder))
    for path in folder.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o444 | (0o111 if path.is_dir() or mode & 0o100 else 0))
