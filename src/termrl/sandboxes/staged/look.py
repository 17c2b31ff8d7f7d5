"""What a policy left in its sandbox, as the first process sees it: no program of the sandbox is asked.

A changed file is one whose ctime is after a moment. ctime follows the kernel's clock, and no program can set it.
"""

# ruff: noqa: PTH108, PTH115
# Paths are bytes here, and pathlib would double the time that a sandbox takes to start.

import os
import stat
import time

from termrl.sandboxes.staged import processes

_MAX_BYTES = 16 << 20
_MAX_S = 30.0
_MAX_NAMES = 1000
_MAX_TABLE = 1 << 20
_LISTENING = b"0A"
# A link whose target lies there would have the tests read their own files for the policy's.
_TESTS_OWN = (b"/tests", b"/logs", b"/solution")
_HINTS = (b"tests", b"logs", b"solution")


def census() -> list[bytes]:
    """``p NAME`` for every process, ``l ADDRESS`` (as in /proc/net/tcp) for every address that is listened on."""
    found = []
    for pid in processes.everyone()[:_MAX_NAMES]:
        name = _text(b"/proc/%d/comm" % pid).rstrip(b"\n")
        if name and processes.stat_of(pid) is not None:
            found.append(b"p " + name)
    # Each read of /proc/net/tcp walks the whole machine's table: only if this sandbox has sockets at all.
    if not _text(b"/proc/net/sockstat").startswith(b"sockets: used 0\n"):
        for table in (b"/proc/net/tcp", b"/proc/net/tcp6"):
            for line in _text(table).splitlines()[1:]:
                fields = line.split()
                if len(fields) > 3 and fields[3] == _LISTENING:
                    found.append(b"l " + fields[1])
    return found


def standing_in(folders: list[bytes]) -> list[bytes]:
    """What stands directly in folders; links to them are followed."""
    return [entry.path for folder in folders for entry in _entries(os.path.realpath(folder))]


class Search:
    """A search for what changed after ``since`` (nanoseconds). ``complete`` is false once something was left out."""

    def __init__(self, since: int) -> None:
        self.since = since
        self.paths: list[bytes] = []
        self.links: list[bytes] = []
        self.complete = True
        self._suspects: list[bytes] = []
        self._size = 0
        self._until = time.monotonic() + _MAX_S

    def folder(self, path: bytes) -> None:
        """A folder and what stands directly in it; a link there is followed."""
        path = os.path.realpath(path)
        if not _read_only(path):
            self._entry(path)
            for entry in _entries(path):
                self._entry(entry.path)

    def tree(self, path: bytes, skipped: bytes) -> None:
        """A whole tree but for what is below ``skipped``, on one file system."""
        try:
            device = os.lstat(path).st_dev
        except OSError:
            return
        if _read_only(path):
            return
        left = [path]
        while left and self._goes_on():
            current = left.pop()
            found = self._entry(current)
            if found is None or not stat.S_ISDIR(found.st_mode) or found.st_dev != device or current == skipped:
                continue
            left.extend(entry.path for entry in _entries(current))

    def workdir(self, path: bytes, names: list[bytes]) -> None:
        """The workdir: only entries whose names match are of interest, and links, however deep."""
        self._suspect(path)
        for entry in _entries(path):
            if any(entry.name.endswith(name[1:]) if name[:1] == b"*" else entry.name == name for name in names):
                self._entry(entry.path)
        self.all_links(path)

    def all_links(self, path: bytes) -> None:
        """Links into the tests, however deep, on one file system."""
        try:
            device = os.lstat(path).st_dev
        except OSError:
            return
        left = [path]
        while left and self._goes_on():
            for entry in _entries(left.pop()):
                if entry.is_symlink():
                    self._suspect(entry.path)
                elif entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_dev == device:
                    left.append(entry.path)

    def remove_links(self) -> None:
        """Remove the new links into folders that only the tests fill."""
        for path in self._suspects:
            target = os.path.realpath(path)
            if any(target == own or target.startswith(own + b"/") for own in _TESTS_OWN):
                os.unlink(path)
                self.links.append(path)

    def _entry(self, path: bytes) -> os.stat_result | None:
        try:
            found = os.lstat(path)
        except OSError:
            return None
        if found.st_ctime_ns > self.since:
            if self._size < _MAX_BYTES:
                self._size += len(path) + 1
                mark = b"@" if stat.S_ISLNK(found.st_mode) else b"%" if stat.S_ISDIR(found.st_mode) else b""
                self.paths.append(mark + path)
            else:
                self.complete = False
            if stat.S_ISLNK(found.st_mode):
                self._suspect(path)
        return found

    def _suspect(self, path: bytes) -> None:
        try:
            if os.lstat(path).st_ctime_ns > self.since and any(hint in os.readlink(path) for hint in _HINTS):
                self._suspects.append(path)
        except OSError:
            return

    def _goes_on(self) -> bool:
        if time.monotonic() < self._until:
            return True
        self.complete = False
        return False


def changes(since: int, workdir: bytes, names: list[bytes], folders: list[bytes], trees: list[bytes]) -> list[bytes]:
    """``+`` or, if not all was seen, ``-``; then every changed path, ``@`` before links and ``%`` before
    folders.

    Last come, with ``>`` before them, the links that were removed.
    """
    search = Search(since)
    for path in folders:
        search.folder(path)
    for path in trees:
        search.tree(path, workdir)
    search.workdir(workdir, names)
    for path in (b"/tmp", b"/var/tmp"):
        search.all_links(path)
    search.remove_links()
    found = [b"+" if search.complete else b"-", *dict.fromkeys(search.paths)]
    return found + [b">" + path for path in dict.fromkeys(search.links)]


def _entries(path: bytes) -> list["os.DirEntry[bytes]"]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _read_only(path: bytes) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return True


def _text(path: bytes) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    pieces = []
    room = _MAX_TABLE
    try:
        while room > 0 and (piece := os.read(fd, min(room, 1 << 16))):
            pieces.append(piece)
            room -= len(piece)
    except OSError:
        pass
    finally:
        os.close(fd)
    return b"".join(pieces)
