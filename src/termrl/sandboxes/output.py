"""Bounded capture of a command's output: head and tail are kept, the middle is counted.

Standard library only: it also runs inside the sandbox.
"""

from __future__ import annotations

import re

CUT_MARK = re.compile(r"\n\[\.\.\. \d+ bytes of output left out \.\.\.\]\n")
"""What stands between the head and the tail of an output whose middle was left out."""


class BoundedOutput:
    """Keeps the first and the last half of ``limit`` bytes of a stream; memory stays within 2 × ``limit``."""

    def __init__(self, limit: int) -> None:
        self._head_limit = max(limit // 2, 0)
        self._tail_limit = max(limit - self._head_limit, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._tail_limit :]
            if len(self._tail) > 2 * self._tail_limit:
                del self._tail[: -self._tail_limit]

    def parts(self) -> tuple[bytes, bytes]:
        """The kept head and tail; what lies between them is ``total`` less their lengths."""
        return bytes(self._head), bytes(self._tail[-self._tail_limit :])

    def text(self) -> tuple[str, int]:
        """The output as text and the number of bytes that are not in it (see :func:`render`)."""
        head, tail = self.parts()
        return render(head, tail, self.total)


def render(head: bytes, tail: bytes, total: int) -> tuple[str, int]:
    """Join a kept head and tail of a stream of ``total`` bytes.

    Returns:
        The text, and how many bytes are missing from it. Invalid UTF-8 is replaced; where bytes are missing, a mark
        says how many, and a character that the cut split is left out rather than shown as damage.
    """
    if len(head) + len(tail) >= total:
        return (head + tail).decode("utf-8", "replace"), 0
    head, tail = _whole_end(head), _whole_start(tail)
    missing = total - len(head) - len(tail)
    mark = f"\n[... {missing} bytes of output left out ...]\n"
    return head.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace"), missing


def _whole_end(data: bytes) -> bytes:
    """Drop an unfinished UTF-8 sequence at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if need > back else data
    return data


def _whole_start(data: bytes) -> bytes:
    """Drop the rest of a UTF-8 sequence at the start."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
