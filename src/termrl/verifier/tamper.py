"""Looking at what a policy left in its sandbox: processes before they are ended, files after that.

A changed file is one whose ctime is after the moment at which the sandbox was handed over. ctime follows the kernel's
clock and cannot be set by a program, other than the time of modification. A write through a shared memory
map does not move it on tmpfs, so that the absence of a signal proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from termrl.errors import CommandError
from termrl.sandboxes.base import Sandbox
from termrl.tasks.task import Task
from termrl.verifier.bootstrap import downloads_in
from termrl.verifier.signals import PYTEST_MODULES, TEST_CONFIG_NAMES, WORKDIR_NAMES, Signal, below, signals_of
from termrl.verifier.system import Undone, is_basic, undo

DOWNLOAD_FILES = (
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/pip.conf",
    "/etc/uv/uv.toml",
    "/etc/gitconfig",
    "/etc/wgetrc",
    "/etc/apt/sources.list",
    "/etc/ssl/certs/ca-certificates.crt",
)
"""Files that say where downloads come from; put back as they were for tests that download."""

_MAX_FILE_BYTES = 1 << 20
_MAX_NAMES = 20
_CLOCK_REALTIME_COARSE = 5  # of <linux/time.h>
_MAX_TICK_MS = 100

_TREES = (
    "/etc",
    "/opt",
    "/root",
    "/home",
    "/srv",
    "/boot",
    "/var/spool/cron",
    "/usr/local",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libx32",
    "/usr/libexec",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/tests",
)


@dataclass(frozen=True)
class Baseline:
    """A sandbox as it was handed over.

    Attributes:
        since: seconds since 1970 by the machine's clock; what changed from then on, the policy changed.
        programs: what stood in the folders of programs; empty where the system cannot be changed.
        downloads: :data:`DOWNLOAD_FILES` as they were (``None``: not there); empty where the tests do not download.
    """

    since: float
    downloads: Mapping[str, bytes | None] = field(default_factory=dict)
    programs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Changes:
    """What a scan found.

    Attributes:
        paths: changed paths.
        search_path: the sandbox's own PATH.
        signals: what they are signals of.
        undone: what was put back or taken away.
        programs: those of the baseline.
    """

    paths: tuple[str, ...]
    search_path: str
    signals: dict[str, Any]
    undone: Undone = field(default_factory=Undone)
    programs: frozenset[str] = frozenset()

    def demoted(self, folders: Sequence[str]) -> frozenset[str]:
        """Those of ``folders`` whose programs could come before the system's own.

        Without :attr:`programs`: those in which something changed, or that are reached through what changed. With
        them: those with a new program of a name that another folder has, or that tests of any task could run.
        """
        changed = {path for path in self.paths if path != "/"} - self.undone.restored - self.undone.removed
        if not self.programs:
            parents = {path.rpartition("/")[0] or "/" for path in changed}
            ancestors = {folder: _ancestors(folder) for folder in folders}
            return frozenset(folder for folder in folders if folder in parents or changed & ancestors[folder])
        names = {posixpath.basename(path) for path in self.programs}
        new = [posixpath.split(path) for path in changed - self.programs]
        return frozenset(folder for folder, name in new if folder in folders and (name in names or is_basic(name)))


async def take_baseline(sandbox: Sandbox, task: Task) -> Baseline:
    """Note how a sandbox is handed over; runs nothing in it, and reads files only where the tests download."""
    downloads: dict[str, bytes | None] = {}
    if task.tests_use_network or downloads_in(task.tests):
        for path in DOWNLOAD_FILES:
            with contextlib.suppress(CommandError, ValueError, OSError):
                downloads[path] = await _content(sandbox, path)
    programs = frozenset(await sandbox.standing_in(_folders(sandbox))) if sandbox.system_is_writable else frozenset()
    return Baseline(await _clear_moment(), downloads, programs)


async def _clear_moment() -> float:
    """A moment that nothing bears which stands already, and that all which is still to come is after.

    Files are stamped with the kernel's coarse clock, a tick behind the fine one: without the wait, what the policy
    does first could bear an earlier time than the hand-over.
    """
    moment = time.time()
    for _ in range(_MAX_TICK_MS):
        if time.clock_gettime(_CLOCK_REALTIME_COARSE) > moment:
            break
        await asyncio.sleep(0.001)
    return moment


async def look_at_processes(sandbox: Sandbox) -> dict[str, Any]:
    """Signals ``killed`` and ``listeners`` of the processes that live now. It is evidence; nothing depends on it."""
    try:
        found = await sandbox.census()
    except (CommandError, OSError) as error:
        return {str(Signal.SCAN_INCOMPLETE): f"processes: {error}"[:200]}
    signals: dict[str, Any] = {}
    if found.names:
        signals[str(Signal.KILLED)] = {"count": len(found.names), "names": sorted(set(found.names))[:_MAX_NAMES]}
    if found.listeners:
        signals[str(Signal.LISTENERS)] = sorted(set(map(_address, found.listeners)))[:_MAX_NAMES]
    return signals


async def look_at_files(sandbox: Sandbox, baseline: Baseline) -> Changes:
    """Find what changed since ``baseline``; planted links to the tests, and a changed system, are undone.

    The policy's processes must be gone.

    Raises:
        CommandError: the look failed.
        OSError: so did it.
    """
    workdir = sandbox.workdir.rstrip("/") or "/"
    folders = _folders(sandbox)
    found = await sandbox.changes(baseline.since, folders=["/", *folders], trees=_TREES, names=WORKDIR_NAMES)
    standing = frozenset(await sandbox.standing_in(folders)) if baseline.programs else frozenset[str]()
    gone = tuple(sorted(baseline.programs - standing))
    undone = await undo(sandbox, replace(found, paths=(*found.paths, *gone)))
    # Python compiles what root runs: new compiled modules are taken away, but say nothing about the policy.
    compiled = {path for path in undone.removed if "/__pycache__/" in path}
    compiled |= {path for path in found.folders if path.endswith("/__pycache__")}
    listed = [path for path in found.paths if path != "/" and not below(path, "/logs")]
    signals = signals_of(listed, workdir=workdir, program_folders=folders, quiet=compiled)
    if undone.restored or undone.removed - compiled:
        signals[str(Signal.UNDONE)] = sorted((undone.restored | undone.removed) - compiled)[:_MAX_NAMES]
    if found.removed_links:
        signals[str(Signal.LINKS_TO_TESTS)] = sorted(found.removed_links)[:_MAX_NAMES]
    if not found.complete:
        signals[str(Signal.SCAN_INCOMPLETE)] = "files: too many changes to list"
    return Changes(found.paths, sandbox.search_path, signals, undone, baseline.programs)


def _folders(sandbox: Sandbox) -> list[str]:
    return [folder for folder in sandbox.search_path.split(":") if folder.startswith("/") and "\n" not in folder]


async def remove_test_config(sandbox: Sandbox, changes: Changes) -> None:
    """Remove what the policy made where pytest would take it for its own or for the tests' own.

    That is configuration in the folders above /tests, and modules in the workdir that are named as pytest's. What
    the task itself brought stays, as does everything if the root is the workdir: there it may have been asked for.
    """
    workdir = sandbox.workdir.rstrip("/")
    if not workdir:
        return
    modules = [f"{workdir}/{name}{suffix}" for name in PYTEST_MODULES for suffix in ("", ".py")]
    names = [*(f"/{name}" for name in TEST_CONFIG_NAMES), *modules]
    if planted := [name for name in names if name in changes.paths]:
        await sandbox.remove(planted)


async def restore_downloads(sandbox: Sandbox, baseline: Baseline) -> None:
    """Put back the files that say where downloads come from, as far as the sandbox lets them be written."""
    for path, before in baseline.downloads.items():
        with contextlib.suppress(CommandError, ValueError, OSError):
            try:
                now = await _content(sandbox, path)
            except (CommandError, ValueError, OSError):
                now = b"\0unreadable"
            if now == before:
                continue
            if before is None:
                await sandbox.remove([path])
            else:
                await sandbox.put_bytes(before, path)


async def _content(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.get_bytes(path, max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        return None


def _ancestors(folder: str) -> set[str]:
    parts = folder.strip("/").split("/")
    return {"/" + "/".join(parts[: n + 1]) for n in range(len(parts))}


def _address(text: str) -> str:
    """``/proc/net/tcp``'s hexadecimal address:port, in the usual form (IPv4 words are in host byte order)."""
    host, _, port = text.partition(":")
    try:
        number = int(port, 16)
        if len(host) == 8:
            return ".".join(str(byte) for byte in reversed(bytes.fromhex(host))) + f":{number}"
    except ValueError:
        return text[:60]
    return f"[{host[:32]}]:{number}"
