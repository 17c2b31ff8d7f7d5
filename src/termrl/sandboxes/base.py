"""The sandbox nouns: what one machine for one episode must be able to do, whichever backend makes it.

Exec semantics (the conformance suite holds every backend to them): each command is a fresh, non-login
``bash -c`` in the workdir with the image's environment and stdin from ``/dev/null``. Directory, variables and
functions do not persist between commands; files and background processes do. A timeout kills the whole process
tree. A background child that holds the output does not hold the call. Output is bounded, head and tail kept.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, get_args

from termrl.errors import CommandError

NetworkMode = Literal["public", "no-network", "allowlist"]
NETWORK_MODES: tuple[NetworkMode, ...] = get_args(NetworkMode)

DEFAULT_OUTPUT_LIMIT = 64 * 1024
# 86 of Terminal-Bench 2's 89 images have their working directory there.
DEFAULT_WORKDIR = "/app"
# The folders of programs where neither image nor task says which.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a backend can bound (see SandboxProvider.limits); files are bytes.
RESOURCES = ("memory", "processes", "files", "file count", "open files", "cpus")


@dataclass(frozen=True)
class Privileges:
    """What a command of a sandbox may do; the default is nothing at all.

    Attributes:
        capabilities: what uid 0 keeps, as in ``CAP_CHOWN`` without its prefix; never one that reaches beyond a sandbox.
        setuid: setuid programs of the image give what they say.
        kernel_root: uid 0 in a sandbox is the kernel's own uid 0.
        user_namespaces: a command can make user namespaces, and so namespaces and mounts within them.
        first_process_at_risk: a command can make the kernel take the first process, and so the sandbox, when memory
            runs out.
    """

    capabilities: frozenset[str] = frozenset()
    setuid: bool = False
    kernel_root: bool = False
    user_namespaces: bool = False
    first_process_at_risk: bool = False


@dataclass(frozen=True)
class ImageBuild:
    """An image that is built from ``context`` (its ``Dockerfile``) in at most ``timeout_s`` seconds."""

    context: Path
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Healthcheck:
    """A command that must succeed in a new sandbox before anyone acts in it. Times are seconds.

    Failures within ``start_period_s`` are not counted; ``retries`` failures after it are the end.
    """

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


@dataclass(frozen=True)
class SandboxSpec:
    """What one sandbox is made from. Sizes are MiB; ``None`` leaves the backend's default.

    Attributes:
        task_id: whose sandbox this is (for labels, messages and sweeping).
        workdir: where commands start; ``None`` for the image's own, else :data:`DEFAULT_WORKDIR`
            (:attr:`Sandbox.workdir` is what holds in a live sandbox).
        image: the task's ``docker_image``; a backend that cannot run it refuses by name.
        build: what the image is built from where ``image`` is ``None``.
        host_userland: the task says that it runs on any host's bash and coreutils.
        files: a host folder whose contents are put into ``workdir`` at start, or ``None``.
        env: the image's and task's environment for every command.
        user: who runs the agent's commands, a name or uid of the image; ``None`` for the image's own user.
        verifier_user: who runs the tests, likewise.
        healthcheck: what must succeed before the sandbox is handed out.
        allowed_hosts: what ``network_mode = "allowlist"`` lets through.
        gpus: how many GPUs the task wants.
    """

    task_id: str
    workdir: str | None = None
    image: str | None = None
    build: ImageBuild | None = None
    host_userland: bool = False
    files: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    memory_mb: int | None = None
    storage_mb: int | None = None
    cpus: float | None = None
    pids: int | None = None
    network_mode: NetworkMode = "no-network"
    allowed_hosts: tuple[str, ...] = ()
    user: str | None = None
    verifier_user: str | None = None
    healthcheck: Healthcheck | None = None
    gpus: int = 0


@dataclass(frozen=True)
class ExecResult:
    """One finished command.

    Attributes:
        output: stdout and stderr as they came, invalid UTF-8 replaced, head and tail kept around a mark when cut.
        exit_code: the shell's exit status (128 + signal when killed); ``None`` when the timeout cut it.
        timed_out: the deadline passed and the whole tree was killed; ``output`` is what had come by then.
        truncated_bytes: how many bytes of output are not in ``output``.
        duration_s: seconds from start to the shell's exit.
        background: processes of this sandbox that still run after the shell's exit.
        oom: the kernel killed something for memory.
    """

    output: str
    exit_code: int | None
    timed_out: bool = False
    truncated_bytes: int = 0
    duration_s: float = 0.0
    background: int = 0
    oom: bool = False


@dataclass(frozen=True)
class Census:
    """The processes of a sandbox and the addresses that are listened on (hexadecimal, as in /proc/net/tcp)."""

    names: tuple[str, ...] = ()
    listeners: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChangedFiles:
    """What changed in a sandbox after a moment.

    Attributes:
        paths: absolute paths of what was made or changed; a removed file shows as its folder.
        folders, links: those of them that are such.
        removed_links: links into the folders that only the verifier fills; they are gone now.
        complete: nothing was left out.
    """

    paths: tuple[str, ...] = ()
    folders: frozenset[str] = frozenset()
    links: frozenset[str] = frozenset()
    removed_links: tuple[str, ...] = ()
    complete: bool = True


class Sandbox(abc.ABC):
    """One live machine. Every method raises :class:`~termrl.errors.SandboxLostError` once it is gone."""

    id: str
    spec: SandboxSpec
    system_is_writable = False
    """Commands can change the programs and libraries of the system; :meth:`restore` then puts the image's back."""

    @property
    def workdir(self) -> str:
        """Where commands start."""
        return self.spec.workdir or DEFAULT_WORKDIR

    @property
    def search_path(self) -> str:
        """PATH as commands have it."""
        return self.spec.env.get("PATH") or DEFAULT_PATH

    @abc.abstractmethod
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
        """Run ``command`` by a fresh ``bash -c`` (no argv limit applies to its length).

        Args:
            timeout_s: seconds after which the whole process tree of this command is killed.
            cwd: working directory; the spec's workdir when ``None``.
            env: variables over the spec's (or, with ``clean_env``, over nothing but the backend's fixed base).

        Raises:
            CommandError: NUL byte in the command, or a working directory or shell that does not exist.
            SandboxLostError: the sandbox died.
        """

    @abc.abstractmethod
    async def put(self, source: Path, target: str, *, exclude: frozenset[str] = frozenset()) -> None:
        """Copy a host file or folder's contents to the absolute path ``target``, modes kept, links as links."""

    @abc.abstractmethod
    async def put_bytes(self, data: bytes, target: str, *, mode: int = 0o644) -> None:
        """Write ``data`` to the absolute path ``target``; parents are made, a symlink there is replaced."""

    @abc.abstractmethod
    async def get_bytes(self, source: str, *, max_bytes: int) -> bytes:
        """Read a regular file (links are not followed).

        Raises:
            FileNotFoundError: nothing is there.
            ValueError: it is not a regular file, or larger than ``max_bytes``.
        """

    @abc.abstractmethod
    async def get(self, source: str, target: Path) -> None:
        """Copy a file or folder out of the sandbox to the host path ``target``."""

    @abc.abstractmethod
    async def kill_all(self) -> int:
        """Stop, then kill every process that commands left running; returns how many there were."""

    @abc.abstractmethod
    async def census(self) -> Census:
        """Look at the processes that live now, without asking any program of the sandbox."""

    @abc.abstractmethod
    async def changes(
        self, since: float, *, folders: Sequence[str], trees: Sequence[str], names: Sequence[str]
    ) -> ChangedFiles:
        """Find what changed, without asking any program of the sandbox, and remove planted links to the tests.

        Such a link (new, anywhere in what is looked at, the workdir or a temporary folder) leads to below /tests,
        /logs or /solution: tests that read it would read their own files. Read-only places are not looked at.

        Args:
            since: seconds since 1970 by the machine's clock.
            folders: looked at with what stands directly in them.
            trees: looked at as a whole, but for the workdir, each on its own file system only.
            names: what is of interest directly in the workdir: names, or ``*`` and an ending.
        """

    @abc.abstractmethod
    async def standing_in(self, folders: Sequence[str]) -> tuple[str, ...]:
        """The absolute paths of what stands directly in ``folders``, without asking any program of the sandbox."""

    @abc.abstractmethod
    async def remove(self, paths: Sequence[str]) -> None:
        """Remove files and folders (absolute paths) without asking any program of the sandbox; links are not followed.

        What is not there is fine.
        """

    async def restore(self, paths: Sequence[str]) -> frozenset[str]:
        """Put files and folders of the image back as they are in it, without asking any program of the sandbox.

        Returns:
            Those of ``paths`` that the image has; the others are left as they are. None, where nothing of the system
            can be changed in the first place.
        """
        return frozenset()

    async def act_as(self, user: str | None) -> None:
        """Have later commands run by another user (a name or uid of the image; ``None`` for root).

        Raises:
            CommandError: there is no such user.
        """
        if user is not None:
            raise CommandError(f"user {user}: this sandbox has only one user")

    @abc.abstractmethod
    async def open_verify_window(self, tests: Path, *, exclude: frozenset[str] = frozenset()) -> None:
        """Make fresh ``/tests`` (the given host folder's contents) and an empty ``/logs/verifier``.

        Whatever the agent put in either place (files, links) is gone. Agent processes must be dead before.
        """

    @abc.abstractmethod
    async def close_verify_window(self) -> None:
        """Take the tests away again."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End everything in it and free its resources. Idempotent; never raises for a sandbox already gone."""


class SandboxProvider(abc.ABC):
    """Makes sandboxes of one kind and counts them.

    Attributes:
        name: what ``--sandbox`` takes.
        swept_first: sandboxes of dead owners that were removed when it was opened.
    """

    name: str
    swept_first: int = 0

    @abc.abstractmethod
    def refusal(self, spec: SandboxSpec) -> str | None:
        """Why this backend cannot run ``spec`` honestly (names the feature), or ``None`` if it can."""

    @abc.abstractmethod
    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start one sandbox.

        Raises:
            TaskError: the spec cannot be honoured (see :meth:`refusal`).
            SandboxStartError: the machine could not start it.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop every live sandbox of this provider."""

    @property
    @abc.abstractmethod
    def live(self) -> int:
        """How many sandboxes are up."""

    @property
    def limits(self) -> Mapping[str, str]:
        """What bounds a sandbox on this machine: resource → by what; a resource that is not there is not bounded.

        The resources are those of :data:`RESOURCES`.
        """
        return {}

    @property
    def privileges(self) -> Privileges:
        """What a command may do; the conformance suite holds a backend to it."""
        return Privileges()

    def sweep(self) -> object:
        """Remove what dead owners of this backend left on this machine; never touch what a live one has.

        Raises:
            NotImplementedError: the backend cannot.
        """
        raise NotImplementedError(f"{self.name} cannot sweep")

    def remains(self) -> list[str]:
        """Every process, mount, folder and cgroup that dead owners of this backend left, one line for each.

        Raises:
            NotImplementedError: the backend cannot tell.
        """
        raise NotImplementedError(f"{self.name} cannot tell what dead owners left")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
