"""Memory that no process has mapped: files in memory that only a descriptor holds, and System V segments.

Where there are cgroups the kernel counts both, but a segment stays when all its processes are dead. Without cgroups
nobody else counts them.
"""

# ruff: noqa: PTH115, PTH116, PTH208
# Paths are bytes here, and pathlib or contextlib would double the time that a sandbox takes to start.

import os

_BLOCK = 512
_IPC_RMID = 0
_SHMID, _ATTACHED, _RESIDENT = 1, 6, 14


def files_held(by_tag: dict[int | None, list[int]]) -> dict[int | None, int]:
    """Bytes of the memory files that each command's processes have open, each file counted once."""
    seen: set[tuple[int, int]] = set()
    held: dict[int | None, int] = {}
    for tag, pids in by_tag.items():
        held[tag] = sum(_held_by(pid, seen) for pid in pids)
    return held


def give_back_segments(limit: int) -> None:
    """Remove the System V segments that nobody has attached if they hold more than ``limit`` bytes together."""
    loose = _loose_segments()
    if sum(size for _, size in loose) > limit:
        _remove(loose)


def _held_by(pid: int, seen: set[tuple[int, int]]) -> int:
    total = 0
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    for name in names:
        path = f"{folder}/{name}"
        try:
            if not os.readlink(path).startswith("/memfd:"):
                continue
            status = os.stat(path)
        except OSError:
            continue
        key = (status.st_dev, status.st_ino)
        if key not in seen:
            seen.add(key)
            total += status.st_blocks * _BLOCK
    return total


def _loose_segments() -> list[tuple[int, int]]:
    """(identifier, resident bytes) of each segment that nobody has attached."""
    try:
        fd = os.open("/proc/sysvipc/shm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    text = b""
    try:
        while piece := os.read(fd, 1 << 16):
            text += piece
    finally:
        os.close(fd)
    rows = [line.split() for line in text.splitlines()[1:]]
    return [(int(row[_SHMID]), int(row[_RESIDENT])) for row in rows if row[_ATTACHED] == b"0"]


def _remove(segments: list[tuple[int, int]]) -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    for ident, _ in segments:
        libc.shmctl(ident, _IPC_RMID, None)
