"""Files and folders as one stream of records, for the way into a sandbox and out of it.

A record is: kind (1 byte: d, f, l, p), mode (4), mtime in ns (8), length of the path (4), size (8), path, data;
integers are big-endian. Paths are relative; the empty path is the top itself. Standard library only: it also runs
inside the sandbox. Contents are moved by ``sendfile``, never through this process's memory.
"""

# ruff: noqa: PTH101, PTH103, PTH106, PTH108, PTH115, PTH118, PTH120, PTH208, PTH211, SIM105
# Paths are bytes here, and pathlib or contextlib would double the time that a sandbox takes to start.

from __future__ import annotations

import os
import stat

_HEADER = 25
_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


class ArchiveError(Exception):
    """A tree that cannot be packed or a stream that cannot be unpacked; the message names the path."""


def pack(source: bytes, out: int, *, exclude: frozenset[bytes] = frozenset(), max_bytes: int | None = None) -> int:
    """Write the file or folder ``source`` to the descriptor ``out``; returns the number of bytes of content.

    Links are packed as links, sockets are left out. A file at the top is one record with an empty path.

    Raises:
        ArchiveError: a device file, a file that changes while it is read, or more than ``max_bytes``.
        OSError: something cannot be read.
    """
    total = 0
    stack = [b""]
    while stack:
        relative = stack.pop()
        path = os.path.join(source, relative) if relative else source
        status = os.lstat(path)
        kind = status.st_mode
        if stat.S_ISDIR(kind):
            write_record(out, b"d", kind, status.st_mtime_ns, relative)
            names = sorted(os.listdir(path), reverse=True)
            children = [os.path.join(relative, name) if relative else name for name in names]
            stack.extend(child for child in children if child not in exclude)
        elif stat.S_ISREG(kind):
            total += status.st_size
            if max_bytes is not None and total > max_bytes:
                raise ArchiveError(f"more than {max_bytes} bytes")
            fd = os.open(path, os.O_RDONLY | _NOFOLLOW)
            try:
                _header(out, b"f", kind, status.st_mtime_ns, relative, status.st_size)
                _send(out, fd, 0, status.st_size, path)
            finally:
                os.close(fd)
        elif stat.S_ISLNK(kind):
            write_record(out, b"l", kind, status.st_mtime_ns, relative, os.readlink(path))
        elif stat.S_ISFIFO(kind):
            write_record(out, b"p", kind, status.st_mtime_ns, relative)
        elif not stat.S_ISSOCK(kind):
            raise ArchiveError(f"{os.fsdecode(path)}: a device file")
    return total


def write_record(out: int, kind: bytes, mode: int, mtime_ns: int, path: bytes, data: bytes = b"") -> None:
    """Write one record whose data is at hand."""
    _header(out, kind, mode, mtime_ns, path, len(data))
    _write(out, data)


def unpack(stream: int, target: bytes) -> None:
    """Read records from the seekable descriptor ``stream`` (from its start) and make them at ``target``.

    What is in the way is replaced, links included; nothing is written through a link of this stream.

    Raises:
        ArchiveError: a path that leaves ``target``, or a stream that is cut short.
        OSError: something cannot be written.
    """
    offset = 0
    end = os.fstat(stream).st_size
    directories: list[tuple[bytes, int, int]] = []
    folders: set[bytes] = set()
    seen: set[bytes] = set()
    while offset < end:
        header = os.pread(stream, _HEADER, offset)
        if len(header) < _HEADER:
            raise ArchiveError("the stream is cut short")
        kind = header[:1]
        mode = int.from_bytes(header[1:5], "big") & 0o7777
        mtime_ns = int.from_bytes(header[5:13], "big", signed=True)
        length = int.from_bytes(header[13:17], "big")
        size = int.from_bytes(header[17:25], "big")
        offset += _HEADER
        relative = os.pread(stream, length, offset)
        offset += length
        if offset + size > end:
            raise ArchiveError("the stream is cut short")
        _check(relative, folders, seen)
        seen.add(relative)
        path = os.path.join(target, relative) if relative else target
        if kind == b"d":
            folders.add(relative)
            if not _is_directory(path):
                remove(path)
                os.makedirs(path, 0o755)
            elif not relative:
                offset += size
                continue
            directories.append((path, mode, mtime_ns))
        else:
            if not relative:
                os.makedirs(os.path.dirname(path) or b".", exist_ok=True)
                if _is_directory(path):
                    raise ArchiveError(f"{os.fsdecode(path)}: is a folder")
            remove(path)
            _make(kind, path, mode, stream, offset, size)
            os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
        offset += size
    for path, mode, mtime_ns in reversed(directories):
        os.chmod(path, mode)
        os.utime(path, ns=(mtime_ns, mtime_ns))


def remove(path: bytes) -> None:
    """Remove whatever is at ``path``, never following a link; nothing there is fine."""
    try:
        if not _is_directory(path):
            os.unlink(path)
            return
    except FileNotFoundError:
        return
    try:
        os.chmod(path, 0o700)
    except OSError:
        pass
    for name in os.listdir(path):
        remove(os.path.join(path, name))
    os.rmdir(path)


def _make(kind: bytes, path: bytes, mode: int, stream: int, offset: int, size: int) -> None:
    if kind == b"f":
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
        try:
            _send(fd, stream, offset, size, path)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    elif kind == b"l":
        os.symlink(os.pread(stream, size, offset), path)
    elif kind == b"p":
        os.mkfifo(path, mode)
    else:
        raise ArchiveError("the stream holds an unknown kind of record")


def _check(relative: bytes, folders: set[bytes], seen: set[bytes]) -> None:
    """A path comes once, stays below the top, and its folder is one that this stream made."""
    if relative in seen:
        raise ArchiveError(f"{os.fsdecode(relative)}: is in the stream twice")
    if not relative:
        return
    if relative.startswith(b"/") or any(part in (b"", b".", b"..") for part in relative.split(b"/")):
        raise ArchiveError(f"{os.fsdecode(relative)}: leaves the folder")
    if os.path.dirname(relative) not in folders:
        raise ArchiveError(f"{os.fsdecode(relative)}: its folder is not in the stream")


def _is_directory(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _header(out: int, kind: bytes, mode: int, mtime_ns: int, path: bytes, size: int) -> None:
    head = kind + (mode & 0o7777).to_bytes(4, "big") + mtime_ns.to_bytes(8, "big", signed=True)
    _write(out, head + len(path).to_bytes(4, "big") + size.to_bytes(8, "big") + path)


def _write(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def _send(out: int, source: int, offset: int, size: int, path: bytes) -> None:
    while size:
        sent = os.sendfile(out, source, offset, size)
        if not sent:
            raise ArchiveError(f"{os.fsdecode(path)}: became shorter while it was read")
        offset += sent
        size -= sent
