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
import json
import os
import secrets
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from termrl.sandboxes.cgroups import remove_groups
from termrl.sandboxes.host import NOBODY, state_folder

_GIVE_UP_S = 5.0


@dataclass
class Swept:
    """What a sweep removed, and how many owners are alive (theirs was not touched)."""

    owners: int = 0
    processes: int = 0
    folders: int = 0
    cgroups: int = 0
    live_owners: int = 0


class Owner:
    """This process's claim on a folder of its own in the state folder."""

    def __init__(self, state: Path) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self.folder = state / "owners" / self.name
        self._pid = os.getpid()
        self.folder.parent.mkdir(mode=0o755, exist_ok=True)
        part = self.folder.with_name(f".new-{self.name}")
        part.mkdir(mode=0o755)
        part.chmod(0o755)
        self._lock = os.open(part / "owner", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts = {"pid": self._pid, "start": _start_time(self._pid), "boot": _boot_id(), "pidns": _pid_namespace()}
        os.write(self._lock, json.dumps(facts).encode())
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
    for folder in sorted(owners.iterdir()):
        if not folder.name.startswith(".new-"):
            if _is_live(folder) and not (own and folder.name.startswith(f"{os.getpid()}-")):
                swept.live_owners += 1
                continue
        elif time.time() - _mtime(folder) < 60:
            # Another process is claiming it right now.
            continue
        swept.owners += 1
        swept.processes += _end_processes(folder)
        swept.cgroups += remove_groups(folder.name)
        swept.folders += sum(1 for entry in _entries(folder) if entry.is_dir()) + 1
        shutil.rmtree(folder, ignore_errors=True)
    return swept


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
    if facts.get("boot") != _boot_id():
        return False
    if facts.get("pidns") != _pid_namespace():
        return True
    return _start_time(int(facts["pid"])) == facts.get("start")


def processes_of(folder: Path) -> list[int]:
    """Processes of ours (launcher, bubblewrap, residents) that belong to an owner's folder."""
    mark = os.fsencode(folder.name) + b"/"
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            line = Path(entry.path, "cmdline").read_bytes()
            if mark in line and entry.stat().st_uid in (os.geteuid(), NOBODY, 0):
                argv = line.split(b"\0")
                if argv[0].rpartition(b"/")[2] == b"bwrap" or b"termrl.sandboxes.staged" in line:
                    found.append(int(entry.name))
    return found


def _end_processes(folder: Path) -> int:
    ended: set[int] = set()
    give_up = time.monotonic() + _GIVE_UP_S
    while (found := processes_of(folder)) and time.monotonic() < give_up:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(found)
        time.sleep(0.01)
    return len(ended)


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


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
