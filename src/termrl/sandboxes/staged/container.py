"""The resident of a container: its first process, or one that the container's daemon runs in it later.

It reaches its owner by a socket in a folder that is mounted into the container and that nothing is in any more when the
first command runs. As the first process it lives until its owner hangs up or its time is over; if it fails, it stays to
reap what ends, so that the container lives on. It may raise ``oom_score_adj`` and limits (CAP_SYS_RESOURCE); no command
keeps that capability, so that none can become harder to kill than the first process.
"""

# ruff: noqa: PTH103, PTH123
# Paths are bytes here, and pathlib or contextlib would double the time that a sandbox takes to start.

import _socket
import ctypes
import os
import resource
import sys
import time

from termrl.sandboxes import archive
from termrl.sandboxes.staged import files, processes
from termrl.sandboxes.staged.bounds import Bounds
from termrl.sandboxes.staged.launcher import reap
from termrl.sandboxes.staged.resident import CONTROL, Resident
from termrl.sandboxes.staged.shielding import ignore_signals, not_dumpable

_SHELL = "/bin/bash"
_FIRST_VICTIM = b"1000"
_OOM_COUNTERS = (b"/sys/fs/cgroup/memory.events", b"/sys/fs/cgroup/memory/memory.oom_control")
_MAX_FILES = 65_536
_CAP_SYS_RESOURCE = 24
_PR_CAPBSET_DROP = 24
_CAPABILITIES_3 = 0x20080522
_OTHER_GROUP = 65534


class ContainerResident(Resident):
    """A resident whose commands run as a user of the image.

    Args:
        deadline: when to end, by the monotonic clock; ``None`` for never.
    """

    def __init__(self, deadline: float | None) -> None:
        super().__init__()
        self.deadline = deadline
        self.user = _User(0, 0, (0,))
        self.counter = _oom_counter()
        self.kills = self._count_kills()
        self.lesser = _LesserCapabilities()

    def do_setup(self, _ident: int, fields: list[bytes], fds: list[int]) -> list[bytes]:
        """Make the working directory, unpack the task's files, take the limits.

        Fields: workdir (empty: make none), user (empty: root), bounds. Answers the user's name and home.
        """
        workdir, user, *limits = fields
        if not os.access(_SHELL, os.X_OK):
            raise files.Refused(b"os", f"the image has no {_SHELL}".encode())
        self.bounds = Bounds(limits)
        self.user, name, home = _find_user(user)
        if workdir:
            os.makedirs(workdir, exist_ok=True)
        if fds:
            archive.unpack(fds[0], workdir)
        return [name, home]

    def do_user(self, _ident: int, fields: list[bytes], _fds: list[int]) -> list[bytes]:
        """Later commands are run by another user. Fields: user (empty: root)."""
        self.user = _find_user(fields[0])[0]
        return []

    def do_cut(self, _ident: int, fields: list[bytes], _fds: list[int]) -> list[bytes]:
        """Kill what is left of a command that another resident ran. Fields: its number. Answers who still lives."""
        processes.kill_tree(int(fields[0]))
        return [str(len(processes.alive())).encode()]

    def keep(self) -> None:
        """What is left to a first process that has failed: reap, until its time is over."""
        os.close(CONTROL)
        while self.deadline is None or time.monotonic() < self.deadline:
            reap()
            time.sleep(1)

    def _wait_ms(self) -> int | None:
        wait = super()._wait_ms()
        if self.deadline is None:
            return wait
        left = max(0, int((self.deadline - time.monotonic()) * 1000) + 1)
        return left if wait is None else min(left, wait)

    def _timers(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            os._exit(0)
        super()._timers()

    def _step_down(self) -> None:
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, _FIRST_VICTIM)
            os.close(fd)
        except OSError:
            pass
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.lesser.take()
        self.user.become()

    def _out_of_memory(self) -> bool:
        before, self.kills = self.kills, self._count_kills()
        return self.kills > before

    def _count_kills(self) -> int:
        if self.counter is None:
            return 0
        try:
            text = os.pread(self.counter, 1024, 0)
        except OSError:
            return 0
        for line in text.splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill":
                return int(value)
        return 0


class _User:
    """Whom commands run as."""

    def __init__(self, uid: int, gid: int, groups: tuple[int, ...]) -> None:
        self.uid, self.gid, self.groups = uid, gid, groups

    def become(self) -> None:
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)


class _LesserCapabilities:
    """This process's capabilities but for CAP_SYS_RESOURCE, prepared so that taking them costs two system calls."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
        # Effective, permitted and inheritable, twice 32 bits of each.
        self._sets = (ctypes.c_uint32 * 6)()
        self._libc.capget(self._header, self._sets)
        for index in range(3):
            self._sets[index] &= ~(1 << _CAP_SYS_RESOURCE) & 0xFFFFFFFF

    def take(self) -> None:
        self._libc.prctl(_PR_CAPBSET_DROP, _CAP_SYS_RESOURCE, 0, 0, 0)
        self._libc.capset(self._header, self._sets)


def _oom_counter() -> int | None:
    """The memory cgroup's file that counts kills, opened before anyone else is here."""
    for path in _OOM_COUNTERS:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return None


def _find_user(wanted: bytes) -> tuple[_User, bytes, bytes]:
    """A user by ``name``, ``uid``, ``name:group`` or ``uid:gid``, with its name and home folder.

    Raises:
        Refused: the image has no such user or group.
    """
    who, _, group = (wanted or b"0").partition(b":")
    accounts = _table(b"/etc/passwd", 7)
    rows = [row for row in accounts if row[0] == who] or [row for row in accounts if row[2] == who]
    if rows:
        name, _, uid, gid, _, home = rows[0][:6]
    elif who.isdigit():
        name, uid, gid, home = who, who, b"0", b"/"
    else:
        raise files.Refused(b"os", b"the image has no user " + who)
    groups = _table(b"/etc/group", 4)
    if group:
        found = [row[2] for row in groups if group in (row[0], row[2])]
        if not found and not group.isdigit():
            raise files.Refused(b"os", b"the image has no group " + group)
        gid = found[0] if found else group
    others = [] if group else [int(row[2]) for row in groups if name in row[3].split(b",")]
    return _User(int(uid), int(gid), (int(gid), *others)), name, home or b"/"


def _table(path: bytes, width: int) -> list[list[bytes]]:
    """The well-formed rows of a file like /etc/passwd; none where there is no such file."""
    try:
        with open(path, "rb") as file:
            rows = [line.split(b":") for line in file.read().splitlines()]
    except OSError:
        return []
    numbers = (2, 3) if width == 7 else (2,)
    return [row for row in rows if len(row) == width and all(row[index].isdigit() for index in numbers)]


def main() -> None:
    """Reach the owner and serve. Arguments: the socket's path, and for a first process the seconds it may live."""
    path, *lifetime = sys.argv[1:3]
    ignore_signals()
    not_dumpable()
    first = bool(lifetime)
    if first:
        # Whose groups are not all the same cannot have its limits changed by another process, not even by root.
        os.setresgid(0, 0, _OTHER_GROUP)
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    sock.connect(path)
    fd = sock.detach()
    if fd != CONTROL:
        os.dup2(fd, CONTROL, inheritable=False)
        os.close(fd)
    os.umask(0o022)
    resident = ContainerResident(time.monotonic() + float(lifetime[0]) if first else None)
    try:
        resident.serve()
    except Exception:
        if not first:
            raise
        resident.keep()
