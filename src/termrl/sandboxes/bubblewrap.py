"""The backend for this machine: one bubblewrap sandbox for each episode, on the host's own read-only programs.

How it works: a launcher (one small process for each provider) starts bubblewrap; the first process in each sandbox
is a resident that takes requests over an inherited socket. Here is the asyncio side of both; nothing blocks, no
thread or process is made for a command.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import re
import resource
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from termrl.errors import CommandError, SandboxError, SandboxLostError, SandboxStartError, TaskError
from termrl.sandboxes import archive, layout
from termrl.sandboxes.base import DEFAULT_OUTPUT_LIMIT, ExecResult, Sandbox, SandboxProvider, SandboxSpec
from termrl.sandboxes.cgroups import Group, Groups, find_roots
from termrl.sandboxes.channel import Channel, pair
from termrl.sandboxes.host import NOBODY, kernel_version, memory_mb, state_folder
from termrl.sandboxes.output import render
from termrl.sandboxes.stage import Stage, stage
from termrl.sandboxes.sweep import Owner, sweep

DEFAULT_MEMORY_MB = 2048
DEFAULT_STORAGE_MB = 1024
DEFAULT_PIDS = 512

_INLINE_COMMAND = 60_000
_START_S = 30.0
_STOP_S = 5.0
_FILES_S = 120.0
_GRACE_S = 15.0
_MAX_GET = 1 << 30
_RLIMIT_NPROC_SINCE = (5, 14)
_FILES_PER_MB = 256
_MAX_FILES = 65_536


# The fields of the resident's answer, and the data that came before it.
_Answer = tuple[list[bytes], bytes]


class BubblewrapSandbox(Sandbox):
    """One live sandbox. Made by :meth:`BubblewrapProvider.create` only."""

    def __init__(self, provider: BubblewrapProvider, spec: SandboxSpec, name: str, folder: Path) -> None:
        self.id = name
        self.spec = spec
        self._provider = provider
        self._folder = folder
        self._group: Group | None = None
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
        where = os.fsencode(cwd or self.spec.workdir)
        if b"\0" in text or b"\0" in where or any(b"\0" in entry for entry in entries):
            raise CommandError("the command holds a NUL byte", hint="a shell command cannot hold one")
        fields = [f"{timeout_s:.6f}".encode(), str(output_limit).encode(), where, str(len(entries)).encode(), *entries]
        number = next(self._numbers)
        with contextlib.ExitStack() as held:
            fds = []
            if len(text) > _INLINE_COMMAND:
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
        with contextlib.closing(await _packed(source, exclude)) as stream:
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

    async def open_verify_window(self, tests: Path, *, exclude: frozenset[str] = frozenset()) -> None:
        await self.close_verify_window()
        with contextlib.closing(await _packed(tests, exclude)) as stream:
            await asyncio.to_thread(_fill, stream.fileno(), self.tests)
        await self._ask(b"verify", [], [], _FILES_S)

    async def close_verify_window(self) -> None:
        self._check()
        for entry in os.listdir(self.tests):
            archive.remove(os.fsencode(self.tests / entry))

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
        """Put the first process, and so all that follow, into a cgroup, which is removed with the sandbox.

        Raises:
            OSError: not permitted.
        """
        self._group = group
        if self._channel is not None and self._channel.peer_pid:
            group.add(self._channel.peer_pid)

    async def furnish(self, fields: Sequence[bytes], fds: Sequence[int]) -> None:
        """Have the resident make the file system and take the limits."""
        await self._ask(b"setup", fields, fds, _START_S)

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
            self._provider.kill(self.id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.ended), _STOP_S)
        self._lose("is stopped")
        self._provider.forget(self.id)
        with contextlib.suppress(OSError):
            archive.remove(os.fsencode(self._folder))
        if self._group is not None:
            for _ in range(100):
                if self._group.remove():
                    break
                await asyncio.sleep(0.01)


class BubblewrapProvider(SandboxProvider):
    """Makes bubblewrap sandboxes on this machine; use it in one event loop at a time.

    Args:
        state: the state folder (see :func:`termrl.sandboxes.host.state_folder`).
        max_storage_mb: the most storage a sandbox gets, whatever its task asks for; it is memory.
        cgroups: ``auto`` uses them where they can be made, ``off`` never.

    Raises:
        SandboxStartError: bubblewrap is missing or too old, or the state folder cannot be used.
    """

    name = "bubblewrap"

    def __init__(
        self, *, state: Path | None = None, max_storage_mb: int = DEFAULT_STORAGE_MB, cgroups: str = "auto"
    ) -> None:
        folder = state_folder(state)
        sweep(folder)
        self._stage: Stage = stage(folder)
        self._owner = Owner(folder)
        self._storage_mb = min(max_storage_mb, memory_mb() // 2)
        self._empty = self._owner.folder / "empty"
        self._empty.touch(0o644)
        self._empty.chmod(0o644)
        self._etc = layout.etc_archive()
        self._groups = self._make_groups(cgroups)
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._names = itertools.count(1)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._closed = False
        atexit.register(self._release)

    @property
    def live(self) -> int:
        return len(self._sandboxes)

    @property
    def limits(self) -> str:
        """What bounds a sandbox on this machine, in one line."""
        files = f"tmpfs of at most {self._storage_mb} MiB"
        if self._groups is not None:
            return f"memory and processes by cgroups v{self._groups.roots.version}, {files}"
        processes = "processes by RLIMIT_NPROC" if _nproc_counts_by_sandbox() else "processes by watching"
        return f"no cgroups: memory by RLIMIT_DATA and watching, {processes}, {files}"

    def refusal(self, spec: SandboxSpec) -> str | None:
        if not spec.host_userland:
            needs = f"image {spec.image}" if spec.image else "an image of its own"
            return f'needs {needs}; bubblewrap runs only tasks that say [metadata] termrl_userland = "host"'
        if spec.network_mode != "no-network":
            return f"network_mode {spec.network_mode}: bubblewrap sandboxes have no network"
        return layout.host_userland_missing()

    async def create(self, spec: SandboxSpec) -> BubblewrapSandbox:
        if why := self.refusal(spec):
            raise TaskError(f"{spec.task_id}: {why}", hint="use another --sandbox for this task")
        if self._closed:
            raise SandboxStartError("the sandbox provider is closed")
        launcher = self._open_launcher()
        name = f"s{next(self._names)}"
        sandbox = BubblewrapSandbox(self, spec, name, self._make_folder(name))
        self._sandboxes[name] = sandbox
        try:
            ours, theirs = pair()
            with theirs:
                sandbox.attach(ours)
                storage_mb = min(spec.storage_mb or DEFAULT_STORAGE_MB, self._storage_mb)
                argv = layout.bwrap_arguments(self._stage, sandbox.tests, self._empty, storage_mb=storage_mb)
                launcher.send([b"spawn", name.encode(), *map(os.fsencode, argv)], [theirs.fileno()])
            await asyncio.wait_for(sandbox.started, _START_S)
            await self._furnish(sandbox, storage_mb)
        except BaseException as error:
            await sandbox.stop()
            if isinstance(error, (SandboxError, TimeoutError, OSError, archive.ArchiveError)):
                raise _start_error(spec, error) from error
            raise
        return sandbox

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes.values())))
        if self._channel is not None:
            self._channel.close()
        if self._launcher is not None:
            await asyncio.to_thread(self._launcher.wait, _STOP_S)
        self._release()
        atexit.unregister(self._release)

    def kill(self, name: str) -> None:
        """Kill a sandbox's bubblewrap from outside."""
        if self._channel is not None:
            self._channel.send([b"kill", name.encode()])

    def forget(self, name: str) -> None:
        """A sandbox has ended."""
        self._sandboxes.pop(name, None)

    # -- parts of create -----------------------------------------------------------------------------------------

    async def _furnish(self, sandbox: BubblewrapSandbox, storage_mb: int) -> None:
        spec = sandbox.spec
        self._limit(sandbox, storage_mb)
        memory = spec.memory_mb or DEFAULT_MEMORY_MB
        pids = spec.pids or DEFAULT_PIDS
        watched_memory = 0 if self._groups is not None else memory << 20
        fields = [os.fsencode(spec.workdir), str(pids).encode(), str(watched_memory).encode()]
        fields += [str(storage_mb * _FILES_PER_MB).encode(), _rlimits(pids, watched_memory)]
        with contextlib.ExitStack() as held:
            fds = [self._etc]
            if spec.files is not None:
                fds.append(held.enter_context(contextlib.closing(await _packed(spec.files, frozenset()))).fileno())
            await sandbox.furnish(fields, fds)

    def _limit(self, sandbox: BubblewrapSandbox, storage_mb: int) -> None:
        if self._groups is None:
            return
        spec = sandbox.spec
        # Files live in memory too, and must not be what a program is killed for.
        memory = (spec.memory_mb or DEFAULT_MEMORY_MB) + storage_mb
        pids = spec.pids or DEFAULT_PIDS
        sandbox.join(self._groups.create(sandbox.id, memory_bytes=memory << 20, pids=pids, cpus=spec.cpus))

    def _make_folder(self, name: str) -> Path:
        folder = self._owner.folder / name
        for path in (folder, folder / "tests"):
            path.mkdir(0o750)
            if os.geteuid() == 0:
                os.chown(path, 0, NOBODY)
        return folder

    def _make_groups(self, setting: str) -> Groups | None:
        roots = find_roots() if setting == "auto" else None
        if roots is None:
            return None
        try:
            return Groups(roots, self._owner.name)
        except OSError:
            return None

    def _open_launcher(self) -> Channel:
        loop = asyncio.get_running_loop()
        if self._channel is not None and not self._channel.closed:
            if self._channel.loop is loop:
                return self._channel
            if self._sandboxes:
                raise SandboxStartError("the provider still has sandboxes in another event loop")
            self._channel.close()
        if self._launcher is not None:
            self._launcher.wait(_STOP_S)
        ours, theirs = pair()
        with theirs:
            argv = self._stage.argv(str(self._stage.folder), "launcher")
            argv.append(str(self._owner.folder) + "/")
            ids = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
            self._launcher = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
                **ids,
            )
        # Root may say that a sandbox dies before the trainer does when the machine runs out of memory.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._launcher.pid}/oom_score_adj").write_text("300")
        self._channel = Channel(ours, self._launched, self._launcher_gone, max_splits=3)
        return self._channel

    def _launched(self, fields: list[bytes]) -> None:
        _, name, code, message = fields
        sandbox = self._sandboxes.get(name.decode())
        if sandbox is not None:
            said = message.decode("utf-8", "replace").strip()
            sandbox.end(said or f"its first process ended ({code.decode()})")

    def _launcher_gone(self) -> None:
        for sandbox in list(self._sandboxes.values()):
            sandbox.end("the launcher ended")

    def _release(self) -> None:
        if self._groups is not None:
            self._groups.remove()
        self._owner.release()


def _error(kind: bytes, message: str) -> Exception:
    if kind == b"missing":
        return FileNotFoundError(message)
    if kind == b"value":
        return ValueError(message)
    return CommandError(message)


def _start_error(spec: SandboxSpec, error: BaseException) -> SandboxStartError:
    said = str(error) or f"no sign of life in {_START_S:.0f} s"
    said = re.sub(r"^sandbox \S+ of task \S+: ", "", said)
    return SandboxStartError(
        f"{spec.task_id}: the sandbox did not start: {said}", hint="termrl doctor says what this machine lacks"
    )


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


async def _packed(source: Path, exclude: frozenset[str]) -> BinaryIO:
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


def _nproc_counts_by_sandbox() -> bool:
    """Since Linux 5.14 RLIMIT_NPROC counts within a user namespace, before that over all of a user's sandboxes."""
    return kernel_version() >= _RLIMIT_NPROC_SINCE


def _rlimits(pids: int, memory_bytes: int) -> bytes:
    hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: min(hard_files, _MAX_FILES)}
    if _nproc_counts_by_sandbox():
        limits[resource.RLIMIT_NPROC] = pids
    if memory_bytes:
        limits[resource.RLIMIT_DATA] = memory_bytes
    return " ".join(f"{name}={value}" for name, value in limits.items()).encode()
