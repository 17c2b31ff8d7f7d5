"""The bounds that no limit of the kernel keeps: they are watched, and what passes one is killed.

The kernel's own limits (cgroups, resource limits, sized tmpfs) come first; see the provider's ``limits``.
"""

# ruff: noqa: SIM105
# contextlib would double the time that a sandbox takes to start.

import _signal  # pyright: ignore[reportMissingImports]
import os
import resource

from termrl.sandboxes.staged import files, memory, processes

_TABLE_FULL = 0.9
_FIRST_VICTIM = b"1000"


class Bounds:
    """A sandbox's bounds and what the last look at its use of them said; 0 means that one is not watched.

    Args:
        fields: processes, bytes of memory, bytes of unattached shared memory, files, and ``number=value`` resource
            limits, as the provider sends them.
    """

    def __init__(self, fields: list[bytes]) -> None:
        self.processes, self.memory, self.segments, self.files = map(int, fields[:4])
        self._limits = [
            (int(name), int(value)) for name, _, value in (item.partition(b"=") for item in fields[4].split())
        ]
        self._last_files = 0

    def take(self) -> None:
        """Put this process, a command's shell to be, under the resource limits."""
        for name, value in self._limits:
            resource.setrlimit(name, (value, value))

    def crowded(self, count: int) -> bool:
        """Whether ``count`` processes leave too little room in the table for the next command."""
        return count >= self.processes * _TABLE_FULL

    def give_back(self) -> None:
        """Free shared memory that nobody has attached, if it is too much."""
        if self.segments:
            memory.give_back_segments(self.segments)

    def watch(self) -> tuple[int | None, bool]:
        """Look once; kills the command that is most to blame for a bound that is passed.

        Returns:
            The killed command (``None``: none), and whether it was for memory.
        """
        self.give_back()
        if self.files:
            used = files.inodes()
            over = used > self.files and used > self._last_files
            self._last_files = used
            if over:
                return cull(), False
        if self.memory:
            by_tag = processes.census()[1]
            held = {tag: sum(map(_resident_bytes, pids)) for tag, pids in by_tag.items()}
            for tag, extra in memory.files_held(by_tag).items():
                held[tag] += extra
            if sum(held.values()) > self.memory:
                return _kill(max(held, key=lambda tag: held[tag])), True
        return None, False


class Victims:
    """Forks what the kernel kills first when memory runs out, never this process.

    A sandbox's /proc is read-only, so that no command can change its own standing. A child inherits this process's,
    which is therefore as bad for a moment; the child goes on only when that is over.

    Args:
        fd: this process's oom_score_adj, opened for reading and writing; a duplicate is kept.
    """

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        os.set_inheritable(self._fd, False)
        self._own = os.pread(self._fd, 16, 0).strip()
        os.close(fd)

    def fork(self) -> int:
        """As :func:`os.fork`."""
        over, hold = os.pipe2(os.O_CLOEXEC)
        pid = -1
        try:
            os.pwrite(self._fd, _FIRST_VICTIM, 0)
            pid = os.fork()
        finally:
            if pid != 0:
                os.pwrite(self._fd, self._own, 0)
            os.close(hold)
            if pid == 0:
                os.read(over, 1)
            os.close(over)
        return pid


def cull() -> int | None:
    """Kill the command that holds most of the process table and return it; ``None`` if there is none."""
    _, by_tag = processes.census()
    if not by_tag:
        return None

    def threads(tag: int | None) -> int:
        return sum(found[1] for pid in by_tag[tag] if (found := processes.stat_of(pid)) is not None)

    return _kill(max(by_tag, key=threads))


def stop_and_kill_everyone(pids: list[int]) -> None:
    """Stop the given processes, so that none acts on the end of another, then kill all there are."""
    for pid in pids:
        try:
            os.kill(pid, _signal.SIGSTOP)
        except ProcessLookupError:
            pass
    processes.kill_everything()


def _kill(tag: int | None) -> int | None:
    if tag is None:
        processes.kill_everything()
    else:
        processes.kill_tree(tag)
    return tag


def _resident_bytes(pid: int) -> int:
    found = processes.stat_of(pid)
    return 0 if found is None else found[2]
