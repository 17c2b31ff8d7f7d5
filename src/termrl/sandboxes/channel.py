"""One end of a SEQPACKET socket in an event loop: whole packets out and in, descriptors along with them."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

# What the launcher and the resident read at once.
_MAX_PACKET = 1 << 17
_BUFFER = 1 << 20


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; neither is inherited by a program that is run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    ours.setblocking(False)
    return ours, theirs


class Channel:
    """Sends and receives packets on the running event loop. Not thread-safe.

    Args:
        on_packet: called with the fields of each packet.
        on_close: called once when the other end is gone.
        max_splits: NULs to split a packet at (what follows the last is one field).

    Attributes:
        peer_pid: the process that sent the first packet, in our pid namespace, as the kernel says.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_packet: Callable[[list[bytes]], None],
        on_close: Callable[[], None],
        *,
        max_splits: int = -1,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self.peer_pid: int | None = None
        self._sock = sock
        self._on_packet = on_packet
        self._on_close = on_close
        self._max_splits = max_splits
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.loop.add_reader(sock.fileno(), self._readable)

    def send(self, fields: Sequence[bytes], fds: Sequence[int] = ()) -> None:
        """Send one packet, now or when there is room. The caller keeps its descriptors and may close them.

        Raises:
            OSError: the packet is larger than the other end takes.
        """
        packet = b"\0".join(fields)
        if self.closed:
            return
        if len(packet) > _MAX_PACKET:
            raise OSError(errno.EMSGSIZE, f"{len(packet)} bytes, more than {_MAX_PACKET}")
        if not self._waiting:
            if self._try(packet, fds):
                return
            self.loop.add_writer(self._sock.fileno(), self._writable)
        # A duplicate, because the sender may close its own before there is room.
        self._waiting.append((packet, [os.dup(fd) for fd in fds]))

    def close(self) -> None:
        """Close this end; ``on_close`` is not called. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if not self.loop.is_closed():
            self.loop.remove_reader(self._sock.fileno())
            self.loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()

    def _try(self, packet: bytes, fds: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        try:
            self._sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionError):
            # The reader hears of it too and says so once.
            pass
        return True

    def _first(self) -> bytes:
        packet, ancillary, _, _ = self._sock.recvmsg(_MAX_PACKET, socket.CMSG_SPACE(struct.calcsize("3i")))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.peer_pid = struct.unpack("3i", data)[0]
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return packet

    def _writable(self) -> None:
        while self._waiting:
            packet, fds = self._waiting[0]
            if not self._try(packet, fds):
                return
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)
        self.loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(64):
            if self.closed:
                return
            try:
                packet = self._sock.recv(_MAX_PACKET) if self.peer_pid else self._first()
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.close()
                with contextlib.suppress(Exception):
                    self._on_close()
                return
            self._on_packet(packet.split(b"\0", self._max_splits))
