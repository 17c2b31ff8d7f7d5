"""File requests inside the sandbox; none follows a link that the agent may have planted at the end of a path."""

# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH108, PTH112, PTH114, PTH118, PTH120
# Paths are bytes here, and pathlib or contextlib would double the time that a sandbox takes to start.

import errno
import os
import stat

from termrl.sandboxes import archive

_FOLDERS = (
    (b"/tmp", 0o1777),
    (b"/var/tmp", 0o1777),
    (b"/root", 0o700),
    (b"/home", 0o755),
    (b"/run", 0o755),
    (b"/var/lib", 0o755),
    (b"/var/log", 0o755),
    (b"/var/cache", 0o755),
    (b"/opt", 0o755),
    (b"/srv", 0o755),
    (b"/mnt", 0o755),
)


class Refused(Exception):
    """A request that cannot be met; the first argument is the kind of error, the second a message."""


def furnish(workdir: bytes) -> None:
    """Make the usual empty folders and the working directory."""
    for path, mode in _FOLDERS:
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
    os.makedirs(workdir, exist_ok=True)


def write(target: bytes, mode: int, source: int) -> None:
    """Put the contents of descriptor ``source`` at ``target`` by a rename, so that a link there is replaced.

    A file that is a mount point (a container's /etc/hosts) cannot be replaced and is written in place.
    """
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    size = os.fstat(source).st_size
    part = os.path.join(folder, b".put-" + os.urandom(8).hex().encode())
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        offset = 0
        while offset < size:
            offset += os.sendfile(fd, source, offset, size - offset)
        os.fchmod(fd, mode)
        try:
            os.rename(part, target)
        except OSError as error:
            if error.errno != errno.EBUSY or not stat.S_ISREG(os.lstat(target).st_mode):
                raise
            _write_in_place(target, source, size)
            os.unlink(part)
    except OSError:
        os.unlink(part)
        raise
    finally:
        os.close(fd)


def _write_in_place(target: bytes, source: int, size: int) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        offset = 0
        while offset < size:
            offset += os.sendfile(fd, source, offset, size - offset)
    finally:
        os.close(fd)


def read(source: bytes, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; no part of its path may be a link."""
    folder = os.open("/", os.O_PATH | os.O_CLOEXEC)
    *parents, name = [part for part in source.split(b"/") if part] or [b"."]
    try:
        for part in parents:
            below = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
            if stat.S_ISLNK(os.fstat(folder).st_mode):
                raise Refused(b"value", source + b": a link is in its path")
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(b"value", source + b": not a regular file")
        if status.st_size > limit:
            raise Refused(b"value", source + f": {status.st_size} bytes, more than {limit}".encode())
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refused(b"value", source + b": not a regular file")
        pieces = []
        room = limit + 1
        while room and (piece := os.read(fd, min(room, 1 << 20))):
            pieces.append(piece)
            room -= len(piece)
    finally:
        os.close(fd)
    if not room:
        raise Refused(b"value", source + f": more than {limit} bytes".encode())
    return b"".join(pieces)


def fresh_verify_folder() -> None:
    """An empty ``/logs/verifier``, whatever was there."""
    if not os.path.isdir(b"/logs") or os.path.islink(b"/logs"):
        archive.remove(b"/logs")
        os.mkdir(b"/logs", 0o755)
    os.chmod(b"/logs", 0o755)
    try:
        archive.remove(b"/logs/verifier")
    except (OSError, RecursionError):
        # Too deep or too odd to be removed: out of the way is enough.
        os.rename(b"/logs/verifier", b"/logs/.old-" + os.urandom(8).hex().encode())
    os.mkdir(b"/logs/verifier", 0o755)


def inodes() -> int:
    """Files and folders in the sandbox's own file systems."""
    used = 0
    for path in ("/", "/etc", "/logs", "/dev/shm"):
        status = os.statvfs(path)
        used += status.f_files - status.f_ffree
    return used
