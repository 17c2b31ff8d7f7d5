"""Files in and out of a sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from termrl.errors import CommandError
from termrl.sandboxes import archive
from termrl.sandboxes.base import Sandbox

ODD = ["with space", "new\nline", "--dash", "quote'\"", "ünï漢", b"\xff\xfe".decode("utf-8", "surrogateescape"), "*"]


async def test_put_over_the_root_keeps_the_folders_modes(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "x").write_text("")
    await sandbox.put(tmp_path, "/tmp")
    assert (await sandbox.exec("stat -c %a /tmp", timeout_s=10)).output == "1777\n"


async def test_what_cannot_be_written_is_an_error(sandbox: Sandbox) -> None:
    for target in ("/usr/bin/new", "/tests/x", "relative"):
        with pytest.raises(CommandError):
            await sandbox.put_bytes(b"x", target)
    with pytest.raises(CommandError, match="No space"):
        await sandbox.put_bytes(b"x" * (100 << 20), "/app/big")
    assert (await sandbox.exec("ls -A /app", timeout_s=10)).output == ""


def stream(*records: tuple[bytes, bytes, bytes]) -> int:
    """A stream of (kind, path, data)."""
    out = os.memfd_create("test")
    for kind, path, data in records:
        archive.write_record(out, kind, 0o755, 0, path, data)
    return out


@pytest.mark.parametrize(
    "records",
    [
        [(b"d", b"", b""), (b"f", b"../out", b"x")],
        [(b"d", b"", b""), (b"f", b"/tmp/out", b"x")],
        [(b"d", b"", b""), (b"l", b"a", b"OUT"), (b"f", b"a/out", b"x")],
        [(b"d", b"", b""), (b"d", b"a", b""), (b"l", b"a", b"OUT"), (b"f", b"a/out", b"x")],
        [(b"d", b"", b""), (b"d", b"a", b""), (b"d", b"a/b", b""), (b"l", b"a/b", b"OUT"), (b"f", b"a/b/out", b"x")],
        [(b"l", b"", b"OUT"), (b"f", b"out", b"x")],
    ],
)
def test_a_hostile_stream_cannot_write_outside_its_target(
    tmp_path: Path, records: list[tuple[bytes, bytes, bytes]]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    fd = stream(*((kind, path, data.replace(b"OUT", os.fsencode(outside))) for kind, path, data in records))
    with pytest.raises(archive.ArchiveError):
        archive.unpack(fd, os.fsencode(tmp_path / "target"))
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "out").exists()
    os.close(fd)


def test_a_stream_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    fd = stream((b"d", b"", b""), (b"f", b"a", b"x" * 100))
    os.ftruncate(fd, os.fstat(fd).st_size - 1)
    with pytest.raises(archive.ArchiveError, match="cut short"):
        archive.unpack(fd, os.fsencode(tmp_path / "target"))
    os.close(fd)
