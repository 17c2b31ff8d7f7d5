"""The backend for this machine: one bubblewrap sandbox for each episode, on the host's own read-only programs.

How it works: a launcher (one small process for each provider) starts bubblewrap; the first process in each sandbox
is a resident that takes requests over an inherited socket (see ``client`` for our side of that).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

from termrl.errors import CommandError, SandboxLostError, SandboxStartError, TaskError
from termrl.sandboxes import layout, seccomp
from termrl.sandboxes.base import DEFAULT_WORKDIR, SandboxProvider, SandboxSpec
from termrl.sandboxes.cgroups import Groups, find_roots
from termrl.sandboxes.channel import Channel, pair
from termrl.sandboxes.client import ResidentSandbox
from termrl.sandboxes.host import NOBODY, kernel_version, memory_mb, state_folder
from termrl.sandboxes.line import START_S, packed
from termrl.sandboxes.stage import Stage, stage
from termrl.sandboxes.sweep import Owner, Swept, processes_of, remains, sweep

DEFAULT_MEMORY_MB = 2048
DEFAULT_STORAGE_MB = 1024
DEFAULT_PIDS = 512

_STOP_S = 5.0
_RLIMIT_NPROC_SINCE = (5, 14)
_FILES_PER_MB = 256
_MAX_FILES = 65_536


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
        self.swept_first = sweep(folder).sandboxes
        self._stage: Stage = stage(folder)
        self._owner = Owner(folder)
        self._storage_mb = min(max_storage_mb, memory_mb() // 2)
        self._empty = self._owner.folder / "empty"
        self._empty.touch(0o644)
        self._empty.chmod(0o644)
        self._etc = layout.etc_archive()
        self._groups = self._make_groups(cgroups)
        self._sandboxes: dict[str, ResidentSandbox] = {}
        self._names = itertools.count(1)
        self._launcher: subprocess.Popen[Any] | None = None
        self._channel: Channel | None = None
        self._closed = False
        atexit.register(self._release)

    @property
    def live(self) -> int:
        return len(self._sandboxes)

    @property
    def limits(self) -> dict[str, str]:
        by_rlimit = "RLIMIT_NPROC" if _nproc_counts_by_sandbox() else "watching"
        open_files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], _MAX_FILES)
        found = {
            "memory": "RLIMIT_DATA for each process, and the sum is watched",
            "processes": by_rlimit,
            "files": f"tmpfs of at most {self._storage_mb} MiB",
            "file count": f"watching, {_FILES_PER_MB} for each MiB",
            "open files": f"RLIMIT_NOFILE, {open_files} for each process",
        }
        if self._groups is not None:
            groups = f"cgroups v{self._groups.roots.version}"
            found["memory"] = groups
            if self._groups.counts_processes:
                found["processes"] = groups
            if self._groups.shares_cpu:
                found["cpus"] = groups
        return found

    def sweep(self) -> Swept:
        return sweep(self._owner.folder.parents[1])

    def remains(self) -> list[str]:
        return remains(self._owner.folder.parents[1])

    def refusal(self, spec: SandboxSpec) -> str | None:
        if not spec.host_userland:
            needs = f"image {spec.image}" if spec.image else "an image of its own"
            if spec.build is not None:
                needs = "an image built from environment/Dockerfile"
            return f'needs {needs}; bubblewrap runs only tasks that say [metadata] termrl_userland = "host"'
        for key, user in (("agent.user", spec.user), ("verifier.user", spec.verifier_user)):
            if user not in (None, "root", "0"):
                return f"{key} {user}: bubblewrap sandboxes have no user but root"
        if spec.healthcheck is not None:
            return "environment.healthcheck: bubblewrap sandboxes start nothing that could become healthy"
        if spec.network_mode != "no-network":
            return f"network_mode {spec.network_mode}: bubblewrap sandboxes have no network"
        return layout.host_userland_missing()

    async def create(self, spec: SandboxSpec) -> ResidentSandbox:
        if why := self.refusal(spec):
            raise TaskError(f"{spec.task_id}: {why}", hint="use another --sandbox for this task")
        if self._closed:
            raise SandboxStartError("the sandbox provider is closed")
        try:
            return await self._start(spec)
        except SandboxLostError as error:
            # A launcher that something killed is started again, once.
            if self._channel is not None and not self._channel.closed:
                raise _start_error(spec, error) from error
        try:
            return await self._start(spec)
        except SandboxLostError as error:
            raise _start_error(spec, error) from error

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes.values())))
        if self._channel is not None:
            self._channel.close()
        if self._launcher is not None:
            await asyncio.to_thread(self._launcher.wait, _STOP_S)
        self._release()
        atexit.unregister(self._release)

    def processes(self) -> list[int]:
        """This machine's process ids of the launcher, bubblewrap and the residents."""
        return processes_of(self._owner.folder)

    def kill(self, name: str) -> None:
        """Kill a sandbox's bubblewrap from outside."""
        if self._channel is not None:
            self._channel.send([b"kill", name.encode()])

    def forget(self, name: str) -> None:
        """A sandbox has ended."""
        self._sandboxes.pop(name, None)

    # -- parts of create -----------------------------------------------------------------------------------------

    async def _start(self, spec: SandboxSpec) -> ResidentSandbox:
        """One try; raises :class:`SandboxLostError` if the sandbox ended before it was ready."""
        launcher = self._open_launcher()
        name = f"s{next(self._names)}"
        sandbox = ResidentSandbox(self, spec, name, self._make_folder(name))
        self._sandboxes[name] = sandbox
        try:
            ours, theirs = pair()
            with theirs:
                sandbox.attach(ours)
                storage_mb = min(spec.storage_mb or DEFAULT_STORAGE_MB, self._storage_mb)
                label = f"{self._owner.name}/{name}"
                argv = layout.bwrap_arguments(
                    self._stage, sandbox.tests, self._empty, storage_mb=storage_mb, label=label
                )
                rules = seccomp.descriptor()
                try:
                    launcher.send([b"spawn", name.encode(), *map(os.fsencode, argv)], [theirs.fileno(), rules])
                finally:
                    os.close(rules)
            await asyncio.wait_for(sandbox.started, START_S)
            await self._furnish(sandbox, storage_mb)
        except BaseException as error:
            await sandbox.stop()
            if isinstance(error, (CommandError, TimeoutError, OSError)):
                raise _start_error(spec, error) from error
            raise
        return sandbox

    async def _furnish(self, sandbox: ResidentSandbox, storage_mb: int) -> None:
        spec = sandbox.spec
        self._limit(sandbox, storage_mb)
        memory = spec.memory_mb or DEFAULT_MEMORY_MB
        pids = spec.pids or DEFAULT_PIDS
        watched_memory = 0 if self._groups is not None else memory << 20
        # Segments that nobody has attached outlive what the kernel kills for memory.
        bounds = (pids, watched_memory, memory << 19, storage_mb * _FILES_PER_MB)
        victims = sandbox.oom_score()
        fields = [os.fsencode(spec.workdir or DEFAULT_WORKDIR), b"0" if victims is None else b"1"]
        fields += [*(str(bound).encode() for bound in bounds), _rlimits(pids, watched_memory)]
        with contextlib.ExitStack() as held:
            fds = [self._etc]
            if spec.files is not None:
                fds.append(held.enter_context(contextlib.closing(await packed(spec.files, frozenset()))).fileno())
            if victims is not None:
                fds.append(held.enter_context(victims).fileno())
            await sandbox.furnish(fields, fds)

    def _limit(self, sandbox: ResidentSandbox, storage_mb: int) -> None:
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
            return Groups(roots, self._owner.name, pids=not _nproc_counts_by_sandbox())
        except OSError:
            return None

    def _adopt(self, launcher: int) -> None:
        """Put the launcher into our cgroups; where that is not permitted, do without them."""
        if self._groups is None:
            return
        try:
            self._groups.adopt(launcher)
        except OSError:
            self._groups.remove()
            self._groups = None

    def _open_launcher(self) -> Channel:
        loop = asyncio.get_running_loop()
        if self._launcher is not None and self._launcher.poll() is not None and self._channel is not None:
            self._channel.close()
            self._launcher_gone()
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
            argv.append(f"{self._owner.name}/launcher")
            ids: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
            launcher = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
                **ids,
            )
        self._launcher = launcher
        # Root may say that a sandbox dies before the trainer does when the machine runs out of memory.
        with contextlib.suppress(OSError):
            Path(f"/proc/{launcher.pid}/oom_score_adj").write_text("300")
        self._adopt(launcher.pid)
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


def _start_error(spec: SandboxSpec, error: BaseException) -> SandboxStartError:
    said = str(error) or f"no sign of life in {START_S:.0f} s"
    said = re.sub(r"^sandbox \S+ of task \S+: ", "", said)
    return SandboxStartError(
        f"{spec.task_id}: the sandbox did not start: {said}", hint="termrl doctor says what this machine lacks"
    )


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
