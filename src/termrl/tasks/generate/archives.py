"""Compressed files whose bytes are the same everywhere: gzip with stored blocks (RFC 1951, 3.2.4; RFC 1952)."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Mapping

_BLOCK = 65535


def gzip_bytes(data: bytes) -> bytes:
    """``data`` as a gzip file that does not compress: what compressors write differs between their versions."""
    blocks = [data[start : start + _BLOCK] for start in range(0, len(data), _BLOCK)] or [b""]
    body = b"".join(
        struct.pack("<BHH", index == len(blocks) - 1, len(block), len(block) ^ 0xFFFF) + block
        for index, block in enumerate(blocks)
    )
    head = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x00\xff"
    return head + body + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def tar_gz_bytes(texts: Mapping[str, str]) -> bytes:
    """A ``.tar.gz`` of text files in the given order, each with mode 644, owner 0 and time 0."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, text in texts.items():
            data = f"{text}\n".encode()
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip_bytes(raw.getvalue())
