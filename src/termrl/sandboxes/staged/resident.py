"""The first process of a sandbox: runs commands on request and tells how they went.

It owns descriptor 3, a SEQPACKET socket to the provider, and ends when that closes; the kernel then kills everything
else. It is not dumpable, so nothing under /proc/1 can be read, it ignores every signal, and it is single-threaded:
one poll loop over the socket, the commands' output pipes and the ends of children.

Packets are fields joined by NUL. In: ``verb id fields…``. Out: ``ok id``, ``err id kind message``, ``out id bytes``
(parts of a result, in order) and ``done id exit_code timed_out total head_bytes duration background oom``.
"""

# Paths are bytes here, and pathlib or contextlib would double the time that a sandbox takes to start.

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import errno
import os
import select
import time

from termrl.sandboxes import archive
from termrl.sandboxes.output import BoundedOutput
from termrl.sandboxes.staged import files, look, memory, processes
from termrl.sandboxes.staged.bounds import Bounds, Victims, cull, stop_and_kill_everyone
from termrl.sandboxes.staged.launcher import reap, receive, wake_on_child
from termrl.sandboxes.staged.shielding import ignore_signals, not_dumpable

CONTROL = 3
_SHELL = "/bin/bash"
_DRAIN_S = 0.1
_WATCH_S = 0.1
_LINGER_S = 0.05
_PART = 48 * 1024
_READ = 1 << 16
_GIVE_UP_S = 2.0
_DYING_S = 0.5
# A command of more than one argument's worth of bytes comes by descriptor; bash reads it whole, then runs it.
_FROM_FD = 'eval "$(</proc/self/fd/9)" 9<&-'


class _Command:
    """One running command: its shell, its output so far and its deadline."""

    def __init__(self, ident: int, pid: int, pipe: int, limit: int, timeout_s: float) -> None:
        self.ident = ident
        self.pid = pid
        self.pipe = pipe
        self.output = BoundedOutput(limit)
        self.started = time.monotonic()
        self.ended = 0.0
        self.deadline = self.started + timeout_s
        self.status: int | None = None
        self.timed_out = False
        self.oom = False
        self.eof = False


class Resident:
    """The state of one sandbox's first process."""

    def __init__(self) -> None:
        self.control = _socket.socket(fileno=CONTROL)
        self.poll = select.poll()
        self.wake = wake_on_child()
        self.poll.register(CONTROL, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.commands: dict[int, _Command] = {}
        self.by_pipe: dict[int, _Command] = {}
        # Pipes that a background process still holds: drained slowly, so that it neither blocks nor is killed.
        self.lingering: set[int] = set()
        self.resting: list[tuple[float, int]] = []
        self.background = 0
        self.next_watch = 0.0
        self.bounds = Bounds([b"0"] * 4 + [b""])
        self.victims: Victims | None = None

    def serve(self) -> None:
        """Run until the provider is gone."""
        self._send(b"hello")
        while True:
            for fd, _ in self.poll.poll(self._wait_ms()):
                if fd == CONTROL:
                    self._request()
                elif fd == self.wake:
                    os.read(self.wake, 4096)
                    self._children()
                elif fd in self.lingering:
                    self._drain_lingering(fd)
                elif fd in self.by_pipe:
                    self._read(self.by_pipe[fd])
            self._timers()

    # -- requests ------------------------------------------------------------------------------------------------

    def _request(self) -> None:
        packet, fds = receive(self.control)
        if not packet:
            os._exit(0)
        verb, ident, *fields = packet.split(b"\0")
        try:
            answer = getattr(self, "do_" + verb.decode())(int(ident), fields, fds)
            if answer is not None:
                self._send(b"ok", ident, *answer)
        except files.Refused as refusal:
            self._send(b"err", ident, *refusal.args)
        except FileNotFoundError as error:
            self._send(b"err", ident, b"missing", _reason(error))
        except OSError as error:
            self._send(b"err", ident, b"os", _reason(error))
        except archive.ArchiveError as error:
            self._send(b"err", ident, b"os", os.fsencode(str(error)))
        finally:
            for fd in fds:
                os.close(fd)

    def do_setup(self, _ident: int, fields: list[bytes], fds: list[int]) -> list[bytes]:
        """Make the folders, unpack /etc and the task's files, take the limits.

        Fields: workdir, whether the last descriptor is for :class:`Victims`, bounds.
        """
        workdir, victims, *limits = fields
        self.bounds = Bounds(limits)
        if victims == b"1":
            self.victims = Victims(fds.pop())
        files.furnish(workdir)
        archive.unpack(fds[0], b"/etc")
        if len(fds) > 1:
            archive.unpack(fds[1], workdir)
        return []

    def do_exec(self, ident: int, fields: list[bytes], fds: list[int]) -> None:
        """Start a command. Fields: timeout, output limit, cwd, the environment's size and entries, command."""
        timeout, limit, cwd, count, *rest = fields
        environment = dict(entry.split(b"=", 1) for entry in rest[: int(count)])
        argv = [b"bash", b"-c", os.fsencode(_FROM_FD) if fds else rest[int(count)]]
        self._make_room()
        try:
            folder = os.open(cwd, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise files.Refused(b"command", b"working directory " + _reason(error)) from None
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.set_blocking(write, True)
            pid = self._fork()
            if pid == 0:
                self._become(ident, argv, environment, folder, write, fds)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
            os.close(folder)
        command = _Command(ident, pid, read, int(limit), float(timeout))
        if not self.commands:
            self.next_watch = command.started + _WATCH_S
        self.commands[ident] = command
        self.by_pipe[read] = command
        self.poll.register(read, select.POLLIN)

    def do_cancel(self, ident: int, _fields: list[bytes], _fds: list[int]) -> None:
        """Kill a running command as if its time were up."""
        command = self.commands.get(ident)
        if command is not None:
            command.deadline = 0.0

    def do_killall(self, _ident: int, _fields: list[bytes], _fds: list[int]) -> list[bytes]:
        """Kill every process of every command; answers how many there were."""
        living = processes.alive()
        stop_and_kill_everyone(living)
        give_up = time.monotonic() + _GIVE_UP_S
        while processes.alive() and time.monotonic() < give_up:
            processes.kill_everything()
            self._children()
            time.sleep(0.001)
        self.background = len(processes.alive())
        if self.background:
            raise files.Refused(b"os", f"{self.background} processes cannot be killed".encode())
        memory.give_back_segments(0)
        return [str(len(living)).encode()]

    def do_put(self, _ident: int, fields: list[bytes], fds: list[int]) -> list[bytes]:
        """Unpack a stream of files. Fields: target."""
        archive.unpack(fds[0], fields[0])
        return []

    def do_write(self, _ident: int, fields: list[bytes], fds: list[int]) -> list[bytes]:
        """Write one file. Fields: target, mode."""
        files.write(fields[0], int(fields[1]), fds[0])
        return []

    def do_read(self, ident: int, fields: list[bytes], _fds: list[int]) -> list[bytes]:
        """Send one regular file. Fields: path, most bytes."""
        self._send_parts(ident, files.read(fields[0], int(fields[1])))
        return []

    def do_get(self, _ident: int, fields: list[bytes], fds: list[int]) -> list[bytes]:
        """Pack a file or folder into the given descriptor. Fields: path, most bytes."""
        archive.pack(fields[0], fds[0], max_bytes=int(fields[1]))
        return []

    def do_verify(self, _ident: int, _fields: list[bytes], _fds: list[int]) -> list[bytes]:
        """A fresh, empty /logs/verifier."""
        files.fresh_verify_folder()
        return []

    def do_remove(self, _ident: int, _fields: list[bytes], fds: list[int]) -> list[bytes]:
        """Remove files and folders. The descriptor holds their paths, with zeros between."""
        size = os.fstat(fds[0]).st_size
        for path in os.pread(fds[0], size, 0).split(b"\0"):
            archive.remove(path)
        return []

    def do_list(self, ident: int, fields: list[bytes], _fds: list[int]) -> list[bytes]:
        """Send what :func:`look.standing_in` finds. Fields: folders."""
        self._send_parts(ident, b"\0".join(look.standing_in(fields)))
        return []

    def do_census(self, ident: int, _fields: list[bytes], _fds: list[int]) -> list[bytes]:
        """Send what :func:`look.census` finds."""
        self._send_parts(ident, b"\0".join(look.census()))
        return []

    def do_changes(self, ident: int, fields: list[bytes], _fds: list[int]) -> list[bytes]:
        """Send what :func:`look.changes` finds. Fields: since, workdir, names, folders, trees (one a line)."""
        since, workdir, *lists = fields
        names, folders, trees = ([part for part in each.split(b"\n") if part] for each in lists)
        self._send_parts(ident, b"\0".join(look.changes(int(since), workdir, names, folders, trees)))
        return []

    # -- commands ------------------------------------------------------------------------------------------------

    def _fork(self) -> int:
        for _ in range(3):
            try:
                return self._fork_once()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                    raise
                self._purge()
        return self._fork_once()

    def _fork_once(self) -> int:
        return os.fork() if self.victims is None else self.victims.fork()

    def _become(
        self,
        ident: int,
        argv: list[bytes],
        environment: dict[bytes, bytes],
        folder: int,
        output: int,
        fds: list[int],
    ) -> None:
        """In the child: turn into the command's shell; never returns."""
        try:
            os.setsid()
            for number in range(1, 65):
                if number not in (_signal.SIGKILL, _signal.SIGSTOP, 32, 33):
                    _signal.signal(number, _signal.SIG_DFL)
            os.fchdir(folder)
            os.dup2(self.null, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if fds:
                os.dup2(fds[0], 9)
            self.bounds.take()
            processes.wear_tag(ident)
            self._step_down()
            os.execve(_SHELL, argv, environment)
        except BaseException as error:
            self._send(b"err", str(ident).encode(), b"command", f"the shell {_SHELL} cannot run: {error}".encode())
        finally:
            os._exit(127)

    def _step_down(self) -> None:
        """In the child, last of all: give up what a command must not have."""

    def _out_of_memory(self) -> bool:
        """Whether the kernel has killed for memory since the last time that this was asked."""
        return False

    def _read(self, command: _Command) -> None:
        for _ in range(16):
            try:
                data = os.read(command.pipe, _READ)
            except BlockingIOError:
                return
            if not data:
                command.eof = True
                self.poll.unregister(command.pipe)
                self._maybe_finish(command)
                return
            command.output.feed(data)

    def _children(self) -> None:
        ended = dict(reap())
        if not ended:
            return
        for command in list(self.commands.values()):
            if command.status is None and command.pid in ended:
                command.status = ended[command.pid]
                command.ended = time.monotonic()
                command.deadline = command.ended + _DRAIN_S
                self._maybe_finish(command)

    def _maybe_finish(self, command: _Command) -> None:
        if command.status is not None and command.eof:
            self._finish(command)

    def _finish(self, command: _Command) -> None:
        del self.commands[command.ident]
        del self.by_pipe[command.pipe]
        if command.eof:
            os.close(command.pipe)
        else:
            self.lingering.add(command.pipe)
        if command.timed_out:
            # What was killed a moment ago may still be on its way out.
            give_up = time.monotonic() + _DYING_S
            while processes.alive(command.ident) and time.monotonic() < give_up:
                time.sleep(0.001)
        running = {other.ident for other in self.commands.values()}
        left = [pid for pid in processes.everyone() if processes.tag_of(pid) not in running]
        self.background = sum(processes.stat_of(pid) is not None for pid in left)
        if self.bounds.crowded(self.background):
            self._purge()
            self.background = len(processes.alive())
        self.bounds.give_back()
        head, tail = command.output.parts()
        self._send_parts(command.ident, head + tail)
        code = b"" if command.timed_out else str(command.status).encode()
        numbers = (int(command.timed_out), command.output.total, len(head))
        duration = f"{(command.ended or time.monotonic()) - command.started:.6f}"
        fields = [code, *(str(number).encode() for number in numbers), duration.encode()]
        fields += [str(self.background).encode(), str(int(self._out_of_memory() or command.oom)).encode()]
        self._send(b"done", str(command.ident).encode(), *fields)

    # -- time ----------------------------------------------------------------------------------------------------

    def _wait_ms(self) -> int | None:
        times = [command.deadline for command in self.commands.values()]
        if self.resting:
            times.append(self.resting[0][0])
        if self.commands or self.background:
            times.append(self.next_watch)
        if not times:
            return None
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1)

    def _timers(self) -> None:
        now = time.monotonic()
        for command in list(self.commands.values()):
            if command.deadline > now:
                continue
            if command.status is not None or command.timed_out:
                self._finish(command)
                continue
            command.timed_out = True
            command.deadline = now + _GIVE_UP_S
            processes.kill_tree(command.ident)
        while self.resting and self.resting[0][0] <= now:
            self.poll.register(self.resting.pop(0)[1], select.POLLIN)
        if (self.commands or self.background) and now >= self.next_watch:
            self.next_watch = now + _WATCH_S
            self._watch()

    def _drain_lingering(self, fd: int) -> None:
        self.poll.unregister(fd)
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            data = b"-"
        if data:
            self.resting.append((time.monotonic() + _LINGER_S, fd))
        else:
            self.lingering.discard(fd)
            os.close(fd)

    def _watch(self) -> None:
        """Hold what no limit of the kernel holds."""
        if self.background and not self.commands:
            self.background = len(processes.alive())
        tag, by_memory = self.bounds.watch()
        command = self.commands.get(tag) if tag is not None else None
        if by_memory and command is not None:
            command.oom = True

    def _purge(self) -> None:
        """Make room in the process table."""
        cull()
        self._children()

    def _make_room(self) -> None:
        if self.background and self.bounds.crowded(processes.census()[0]):
            self._purge()

    # -- sending -------------------------------------------------------------------------------------------------

    def _send(self, *fields: bytes) -> None:
        try:
            self.control.send(b"\0".join(fields))
        except OSError:
            os._exit(0)

    def _send_parts(self, ident: int, data: bytes) -> None:
        label = b"out\0" + str(ident).encode() + b"\0"
        for start in range(0, len(data), _PART):
            try:
                self.control.send(label + data[start : start + _PART])
            except OSError:
                os._exit(0)


def _reason(error: OSError) -> bytes:
    name = error.filename
    where = b"" if name is None or isinstance(name, int) else os.fsencode(name) + b": "
    return where + os.fsencode(error.strerror or str(error))


def main() -> None:
    """Take the socket over and serve."""
    os.set_inheritable(CONTROL, False)
    ignore_signals()
    not_dumpable()
    resident = Resident()
    os.dup2(resident.null, 2)
    os.umask(0o022)
    resident.serve()
