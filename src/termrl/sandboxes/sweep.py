"""Nothing outlives its owner: who owns what is written down before it exists, and a sweep removes what is orphaned.

Each provider claims a folder ``owners/<name>`` in the state folder. Its ``owner`` file says which process it is (pid,
start time, boot, pid namespace) and is locked for as long as that process lives. Everything of the owner can be found
from the folder's name alone: sandboxes' folders lie in it, cgroups carry it, processes have it on their command line.
No mount is ever made outside the sandboxes' own namespaces.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from termrl.sandboxes.cgroups import PREFIX, groups_of_owners, remove_groups
from termrl.sandboxes.host import NOBODY, state_folder

_GIVE_UP_S = 5.0


@dataclass
class Swept:
    """What a sweep removed, and how many owners are alive (theirs was not touched)."""

    owners: int = 0
    processes: int = 0
    folders: int = 0
    cgroups: int = 0
    containers: int = 0
    live_owners: int = 0

    @property
    def sandboxes(self) -> int:
        """How many sandboxes that was: each has a folder in its owner's, whatever else it had."""
        return max(self.folders - self.owners, self.containers)


class Owner:
    """This process's claim on a folder of its own in the state folder."""

    def __init__(self, state: Path) -> None:
        owners = state / "owners"
        owners.mkdir(mode=0o755, exist_ok=True)
        self.name = f"{os.getpid()}-{_mark(owners)}-{secrets.token_hex(6)}"
        self.folder = owners / self.name
        self._pid = os.getpid()
        part = self.folder.with_name(f".new-{self.name}")
        part.mkdir(mode=0o755)
        part.chmod(0o755)
        self._lock = os.open(part / "owner", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps(this_process()).encode())
        part.rename(self.folder)

    def release(self) -> None:
        """Remove the folder. Idempotent; in a forked child it does nothing."""
        if self._lock < 0 or os.getpid() != self._pid:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def sweep(state: Path | None = None, *, own: bool = False) -> Swept:
    """Remove the processes, folders and cgroups of every owner that is dead.

    A live owner's are never touched, except with ``own`` those of this process, which is about to end. ``state`` as in
    :func:`termrl.sandboxes.host.state_folder`.
    """
    owners = state_folder(state) / "owners"
    swept = Swept()
    if not owners.is_dir():
        return swept
    names = {folder.name for folder in _entries(owners)} | set(_owners_seen(owners))
    dead = []
    for name in sorted(names):
        if name.startswith(".new-") and time.time() - _mtime(owners / name) < 60:
            # Another process is claiming it right now.
            continue
        if _is_live(owners / name) and not (own and name.startswith(f"{os.getpid()}-")):
            swept.live_owners += 1
        else:
            dead.append(name)
    for name in dead:
        swept.processes += _end_processes(name)
    for top in groups_of_owners() if dead else []:
        if top.name.removeprefix(PREFIX) in dead:
            swept.cgroups += remove_groups(top)
    for name in dead:
        swept.folders += sum(1 for entry in _entries(owners / name) if entry.is_dir()) + (owners / name).exists()
        _remove_folder(owners / name)
    swept.owners = len(dead)
    return swept


def remains(state: Path | None = None) -> list[str]:
    """What dead owners have left, one line each: folders, processes of ours, cgroups, mounts.

    It starts from what the machine shows, so that it also finds what no folder leads to any more. ``state`` as in
    :func:`termrl.sandboxes.host.state_folder`.
    """
    owners = state_folder(state) / "owners"
    if not owners.is_dir():
        return []
    found = {f"process {pid}": name for name, pids in _owners_seen(owners).items() for pid in pids}
    found |= {f"folder {folder}": folder.name for folder in _entries(owners)}
    mark = f"-{_mark(owners)}-"
    found |= {f"cgroup {top}": top.name.removeprefix(PREFIX) for top in groups_of_owners() if mark in top.name}
    left = [line for line, name in found.items() if not _is_live(owners / name)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted(left + [f"mount {line.split()[4]}" for line in mounts if f"{owners}/" in line])


def _mark(owners: Path) -> str:
    """What tells the owners of one state folder from those of another, in names of processes and cgroups.

    Not its path: a container whose processes can be seen from here may have one at the same path. Not the path's inode
    alone: once a folder is gone, the next one made may get its number.
    """
    status = owners.stat()
    facts = f"{status.st_dev}:{status.st_ino}:{boot_id()}:{_seal(owners.with_name('seal'))}"
    return hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()


def _seal(file: Path) -> str:
    """What is in ``file``, made of chance by who comes first."""
    if not file.exists():
        part = file.with_name(f".seal-{secrets.token_hex(6)}")
        part.write_text(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):
            os.link(part, file)
        part.unlink()
    return file.read_text()


def _owners_seen(owners: Path) -> dict[str, list[int]]:
    """Owners of this state folder by whom processes run on this machine → those processes."""
    pattern = re.compile(rb"(\d+-" + _mark(owners).encode() + rb"-[0-9a-f]{12})/")
    found: dict[str, list[int]] = {}
    for pid, line in _processes_of_ours():
        for name in set(pattern.findall(line)):
            found.setdefault(name.decode(), []).append(pid)
    return found


def _is_live(folder: Path) -> bool:
    """An owner lives while its file is locked, unless the lock is only inherited from a process that is gone."""
    try:
        fd = os.open(folder / "owner", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        facts = json.loads(os.read(fd, 4096) or b"{}")
    finally:
        os.close(fd)
    return still_runs(facts)


def this_process() -> dict[str, Any]:
    """What this process is known by after its end: pid, start, boot and pid namespace."""
    pid = os.getpid()
    return {"pid": pid, "start": _start_time(pid), "boot": boot_id(), "pidns": _pid_namespace()}


def still_runs(facts: Mapping[str, Any]) -> bool:
    """Whether the process of these facts lives; one of another pid namespace of this boot counts as if it did."""
    if facts.get("boot") != boot_id():
        return False
    if facts.get("pidns") != _pid_namespace():
        return True
    return _start_time(int(facts["pid"])) == facts.get("start")


def processes_of(folder: Path) -> list[int]:
    """Processes of ours (launcher, bubblewrap, residents) that belong to an owner's folder."""
    mark = os.fsencode(folder.name) + b"/"
    return [pid for pid, line in _processes_of_ours() if mark in line]


def _processes_of_ours() -> Iterator[tuple[int, bytes]]:
    """(pid, command line) of every launcher, bubblewrap and resident, whoever owns it."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            line = Path(entry.path, "cmdline").read_bytes()
            ours = line.partition(b"\0")[0].rpartition(b"/")[2] == b"bwrap" or b"termrl.sandboxes.staged" in line
            if ours and entry.stat().st_uid in (os.geteuid(), NOBODY, 0):
                yield int(entry.name), line


def _end_processes(name: str) -> int:
    ended: set[int] = set()
    give_up = time.monotonic() + _GIVE_UP_S
    while (found := processes_of(Path(name))) and time.monotonic() < give_up:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(found)
        time.sleep(0.01)
    return len(ended)


def _remove_folder(folder: Path) -> None:
    """Remove it even while a thread of this process, which is about to end, still writes into it."""
    give_up = time.monotonic() + _GIVE_UP_S
    while folder.exists() and time.monotonic() < give_up:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.01)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _mtime(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _start_time(pid: int) -> int | None:
    """Start of a live process in clock ticks after boot; ``None`` if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """The id that the kernel gave to this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
