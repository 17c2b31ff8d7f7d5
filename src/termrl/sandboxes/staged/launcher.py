"""Starts bubblewrap on request and reports each end; one process for each provider.

It exists so that a large process never forks, and because bubblewrap's ``--die-with-parent`` fires when the thread
that started it ends. It ends when its control socket (standard input) closes, and everything that it started then ends.

Packets are fields joined by NUL. In: ``spawn id argv…`` with two descriptors (the sandbox's end of its socket,
its system call filter), ``kill id``. Out: ``exited id status message``.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import os
import select
import sys

_CONTROL = 0
_SANDBOX_END = 3
_FILTER = 4
_MAX_PACKET = 1 << 17
_MSG_CMSG_CLOEXEC = 0x40000000
_SIZE_OF_FD = 4


def receive(sock: _socket.socket) -> tuple[bytes, list[int]]:
    """One packet and the descriptors that came with it; empty when the other end is gone."""
    data, ancillary, _, _ = sock.recvmsg(_MAX_PACKET, _socket.CMSG_SPACE(4 * _SIZE_OF_FD), _MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            for start in range(0, len(payload) - _SIZE_OF_FD + 1, _SIZE_OF_FD):
                fds.append(int.from_bytes(payload[start : start + _SIZE_OF_FD], sys.byteorder))
    return data, fds


def wake_on_child() -> int:
    """Make the end of a child readable on the returned descriptor."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    return read


def reap() -> list[tuple[int, int]]:
    """Every child that has ended, as (pid, exit status; 128 + signal when killed)."""
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        ended.append((pid, code))


def main() -> None:
    """Serve until the control socket closes."""
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, _signal.SIG_IGN)
    control = _socket.socket(fileno=_CONTROL)
    os.set_inheritable(_CONTROL, False)
    wake = wake_on_child()
    poll = select.poll()
    poll.register(_CONTROL, select.POLLIN)
    poll.register(wake, select.POLLIN)
    running: dict[int, tuple[bytes, int]] = {}
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    while True:
        for fd, _ in poll.poll():
            if fd == wake:
                os.read(wake, 4096)
                for pid, code in reap():
                    ident, messages = running.pop(pid, (b"", -1))
                    if messages >= 0:
                        _report(control, ident, code, messages)
                continue
            packet, fds = receive(control)
            if not packet:
                os._exit(0)
            verb, *fields = packet.split(b"\0")
            if verb == b"spawn":
                _spawn(control, running, fields, fds, null)
            elif verb == b"kill":
                for pid, (ident, _messages) in running.items():
                    if ident == fields[0]:
                        os.kill(pid, _signal.SIGKILL)
            for received in fds:
                os.close(received)


def _spawn(
    control: _socket.socket, running: dict[int, tuple[bytes, int]], fields: list[bytes], fds: list[int], null: int
) -> None:
    ident, *argv = fields
    messages, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    actions = [
        (os.POSIX_SPAWN_DUP2, null, 0),
        (os.POSIX_SPAWN_DUP2, null, 1),
        (os.POSIX_SPAWN_DUP2, write, 2),
        (os.POSIX_SPAWN_DUP2, fds[0], _SANDBOX_END),
        (os.POSIX_SPAWN_DUP2, fds[1], _FILTER),
    ]
    defaults = [_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE]
    try:
        pid = os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsigdef=defaults)
    except OSError as error:
        os.close(messages)
        control.send(b"\0".join((b"exited", ident, b"127", os.fsencode(str(error)))))
    else:
        running[pid] = (ident, messages)
    finally:
        os.close(write)


def _report(control: _socket.socket, ident: bytes, code: int, messages: int) -> None:
    try:
        text = os.read(messages, 2048)
    except BlockingIOError:
        text = b""
    os.close(messages)
    control.send(b"\0".join((b"exited", ident, str(code).encode(), text.replace(b"\0", b""))))
