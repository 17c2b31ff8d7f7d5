"""The processes of a sandbox as its first process sees them, and how each is told to belong to a command.

Every command's shell gets its own value of RLIMIT_RTTIME, which means nothing here (nobody may use real-time
scheduling) but is inherited by fork, exec, ``setsid``, ``env -i`` and daemons alike. A process that lowers its own
can only escape the timeout of its command, never :func:`kill_everything`.
"""

# ruff: noqa: PTH208, SIM105
# Paths are bytes here, and pathlib or contextlib would double the time that a sandbox takes to start.

import _signal  # pyright: ignore[reportMissingImports]
import os
import resource

_TAG_BASE = 1 << 40
_RTTIME = b"Max realtime timeout"
_ROUNDS = 60
_PAGE = os.sysconf("SC_PAGESIZE")


def wear_tag(ident: int) -> None:
    """Mark this process, and all that will come from it, as belonging to command ``ident``."""
    resource.setrlimit(resource.RLIMIT_RTTIME, (_TAG_BASE + ident, _TAG_BASE + ident))


def tag_of(pid: int) -> int | None:
    """The command that a process belongs to; ``None`` if it is gone or wears no tag."""
    try:
        soft, _ = resource.prlimit(pid, resource.RLIMIT_RTTIME)
    except PermissionError:
        # Another user's, and this process has no CAP_SYS_RESOURCE.
        soft = _shown_limit(pid)
    except (OSError, ValueError):
        return None
    return soft - _TAG_BASE if soft >= _TAG_BASE else None


def _shown_limit(pid: int) -> int:
    """RLIMIT_RTTIME as /proc shows it to anyone; 0 if it shows none."""
    try:
        fd = os.open(f"/proc/{pid}/limits", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        text = os.read(fd, 4096)
    except OSError:
        return 0
    finally:
        os.close(fd)
    for line in text.splitlines():
        if line.startswith(_RTTIME):
            value = line[len(_RTTIME) :].split()[0]
            return int(value) if value.isdigit() else 0
    return 0


def everyone() -> list[int]:
    """Every process but the first and this one, zombies included."""
    spared = ("1", str(os.getpid()))
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name not in spared]


def stat_of(pid: int) -> tuple[str, int, int] | None:
    """(state letter, number of threads, resident bytes) of a live process, or ``None``."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fields = os.read(fd, 1024).rpartition(b")")[2].split()
    except OSError:
        return None
    finally:
        os.close(fd)
    state = fields[0].decode()
    return None if state in "ZX" else (state, int(fields[17]), int(fields[21]) * _PAGE)


def alive(tag: int | None = None) -> list[int]:
    """Live processes, of one command or of all."""
    return [pid for pid in everyone() if (tag is None or tag_of(pid) == tag) and stat_of(pid) is not None]


def kill_tree(tag: int) -> None:
    """Kill every process of a command. All are stopped first, so that none can outrun the killing by forking."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        members = [pid for pid in everyone() if tag_of(pid) == tag]
        fresh = [pid for pid in members if pid not in stopped]
        if not fresh:
            break
        _signal_all(fresh, _signal.SIGSTOP)
        stopped.update(fresh)
    _signal_all(list(stopped), _signal.SIGKILL)


def kill_everything() -> None:
    """Kill every process of the sandbox but the first and this one, in one system call that no fork can outrun."""
    try:
        os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def census() -> tuple[int, dict[int | None, list[int]]]:
    """(threads, live processes by command) of the whole sandbox."""
    threads = 0
    by_tag: dict[int | None, list[int]] = {}
    for pid in everyone():
        found = stat_of(pid)
        if found is not None:
            threads += found[1]
            by_tag.setdefault(tag_of(pid), []).append(pid)
    return threads, by_tag


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
