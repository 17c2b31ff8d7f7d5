"""Files in and out of a sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from termrl.errors import CommandError
from termrl.sandboxes import archive
from termrl.sandboxes.base import Sandbox, SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider

ODD = ["with space", "new\nline", "--dash", "quote'\"", "ünï漢", b"\xff\xfe".decode("utf-8", "surrogateescape"), "*"]


def odd_tree(root: Path) -> Path:
    """A folder with odd names, modes, links and an empty folder."""
    (root / "deep/er").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o700)
    for name in ODD:
        (root / "deep/er" / name).write_text(f"in {len(name)}")
    (root / "run.sh").write_text("#!/bin/bash\necho ran\n")
    (root / "run.sh").chmod(0o750)
    (root / "link").symlink_to("deep/er")
    (root / "dangling").symlink_to("/no/where")
    return root


def listing(root: Path) -> dict[str, tuple[int, str]]:
    """Relative path → (mode, link target or text)."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            content = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else ""
            found[str(path.relative_to(root))] = (path.lstat().st_mode, content)
    return found


async def test_a_tree_with_odd_names_comes_through_both_ways(sandbox: Sandbox, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "source")
    await sandbox.put(source, "/app/tree")
    assert (await sandbox.exec("/app/tree/run.sh; ls /app/tree/link | wc -l", timeout_s=10)).output.startswith("ran\n")
    await sandbox.get("/app/tree", tmp_path / "back")
    assert listing(tmp_path / "back") == listing(source)


async def test_a_2_mb_file_comes_through_both_ways(sandbox: Sandbox, tmp_path: Path) -> None:
    data = os.urandom(2 << 20)
    (tmp_path / "big").write_bytes(data)
    await sandbox.put(tmp_path / "big", "/app/big")
    assert await sandbox.get_bytes("/app/big", max_bytes=4 << 20) == data
    await sandbox.put_bytes(data[::-1], "/app/made/of/bytes", mode=0o600)
    await sandbox.get("/app/made/of/bytes", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data[::-1]


async def test_the_specs_files_are_in_the_workdir_with_their_times(
    provider: BubblewrapProvider, tmp_path: Path
) -> None:
    (tmp_path / "old").write_text("x")
    os.utime(tmp_path / "old", (1_000_000_000, 1_000_000_000))
    sandbox = await provider.create(SandboxSpec("t", workdir="/work/here", host_userland=True, files=tmp_path))
    assert (await sandbox.exec("pwd; stat -c '%n %Y %u' *", timeout_s=10)).output == "/work/here\nold 1000000000 0\n"


async def test_excluded_paths_stay_out(sandbox: Sandbox, tmp_path: Path) -> None:
    for name in ("Dockerfile", "keep", "sub"):
        (tmp_path / name).mkdir() if name == "sub" else (tmp_path / name).write_text("")
    (tmp_path / "sub" / "Dockerfile").write_text("")
    await sandbox.put(tmp_path, "/app", exclude=frozenset({"Dockerfile"}))
    assert (await sandbox.exec("find . -type f | sort | xargs", timeout_s=10)).output == "./keep ./sub/Dockerfile\n"


async def test_put_over_the_root_keeps_the_folders_modes(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "x").write_text("")
    await sandbox.put(tmp_path, "/tmp")
    assert (await sandbox.exec("stat -c %a /tmp", timeout_s=10)).output == "1777\n"


async def test_put_bytes_replaces_a_link_and_leaves_what_it_pointed_to(sandbox: Sandbox) -> None:
    await sandbox.exec("echo safe > /tmp/target; ln -s /tmp/target /app/link", timeout_s=10)
    await sandbox.put_bytes(b"new", "/app/link", mode=0o640)
    result = await sandbox.exec("cat /tmp/target; stat -c '%F %a' link; cat link", timeout_s=10)
    assert result.output == "safe\nregular file 640\nnew"


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("ln -s /tmp/real /app/f", "not a regular file"),
        ("ln -s /tmp /app/d; echo 1 > /tmp/f; rmdir /app/x 2>/dev/null; ln -s /tmp /app/f.d", None),
        ("mkfifo /app/f", "not a regular file"),
        ("mkdir /app/f", "not a regular file"),
        ("head -c 5000 /dev/zero > /app/f", "5000 bytes, more than 4096"),
    ],
)
async def test_get_bytes_takes_only_small_regular_files(sandbox: Sandbox, plant: str, said: str | None) -> None:
    await sandbox.exec(plant, timeout_s=10)
    path, said = ("/app/f", said) if said else ("/app/d/f", "link is in its path")
    with pytest.raises(ValueError, match=said):
        await sandbox.get_bytes(path, max_bytes=4096)


async def test_get_bytes_of_nothing_is_file_not_found(sandbox: Sandbox) -> None:
    for path in ("/app/no", "/no/such/file"):
        with pytest.raises(FileNotFoundError):
            await sandbox.get_bytes(path, max_bytes=10)


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
