"""Files in and out, and the verify window."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from termrl.errors import CommandError
from termrl.sandboxes.conformance.check import EXEC_S, Section, Subject, Unmet, ask, need, refused, same

section = Section("files")

_ODD = ("with space", "new\nline", "--dash", "quote'\"", "ünï漢", b"\xff\xfe".decode("utf-8", "surrogateescape"), "*")
_LARGE = 2 << 20
_SMALL = 4096


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="termrl-conformance-") as name:
        yield Path(name)


def _odd_tree(root: Path) -> Path:
    """A folder with odd names, modes, links and an empty folder."""
    (root / "deep/er").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o700)
    for name in _ODD:
        (root / "deep/er" / name).write_text(f"in {len(name)}")
    (root / "run.sh").write_text("#!/bin/bash\necho ran\n")
    (root / "run.sh").chmod(0o750)
    (root / "link").symlink_to("deep/er")
    (root / "dangling").symlink_to("/no/where")
    return root


def _listing(root: Path) -> dict[str, tuple[int, str]]:
    """Relative path → (mode, link target or text)."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            content = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else ""
            found[str(path.relative_to(root))] = (path.lstat().st_mode, content)
    return found


@section.check("a tree with odd names, modes and links comes through both ways")
async def odd_tree(subject: Subject) -> None:
    with _folder() as here:
        source = _odd_tree(here / "source")
        async with subject.sandbox() as sandbox:
            await sandbox.put(source, "/app/tree")
            found = await ask(sandbox, f"/app/tree/run.sh; cat '/app/tree/link/{_ODD[0]}'")
            same(found, f"ran\nin {len(_ODD[0])}", "a script and a file through a link")
            await sandbox.get("/app/tree", here / "back")
        same(_listing(here / "back"), _listing(source), "the tree that came back")


@section.check("a file of 2 MB comes through both ways")
async def large_file(subject: Subject) -> None:
    data = os.urandom(_LARGE)
    with _folder() as here:
        (here / "large").write_bytes(data)
        async with subject.sandbox() as sandbox:
            await sandbox.put(here / "large", "/app/large")
            need(await sandbox.get_bytes("/app/large", max_bytes=2 * _LARGE) == data, "get_bytes gives other bytes")
            await sandbox.put_bytes(data[::-1], "/app/made/of/bytes", mode=0o600)
            same(await ask(sandbox, "stat -c '%s %a' /app/made/of/bytes"), f"{_LARGE} 600\n", "size and mode")
            await sandbox.get("/app/made/of/bytes", here / "back")
        need((here / "back").read_bytes() == data[::-1], "get gives other bytes")


@section.check("the spec's files are in the workdir, owned by root, with their times")
async def files_of_the_spec(subject: Subject) -> None:
    with _folder() as here:
        (here / "old").write_text("x")
        os.utime(here / "old", (1_000_000_000, 1_000_000_000))
        async with subject.sandbox(workdir="/srv/here", files=here) as sandbox:
            found = await ask(sandbox, "pwd; stat -c '%n %Y %u' *")
    same(found, "/srv/here\nold 1000000000 0\n", "workdir, name, time and owner")


@section.check("excluded paths stay out")
async def excluded(subject: Subject) -> None:
    with _folder() as here:
        (here / "sub").mkdir()
        for name in ("Dockerfile", "keep", "sub/Dockerfile"):
            (here / name).write_text("")
        async with subject.sandbox() as sandbox:
            await sandbox.put(here, "/app", exclude=frozenset({"Dockerfile"}))
            found = await ask(sandbox, "find . -type f | sort | xargs")
    same(found, "./keep ./sub/Dockerfile\n", "files that came in")


@section.check("put_bytes replaces a link and leaves what it pointed to")
async def link_in_the_way(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "echo safe > /tmp/target; ln -s /tmp/target /app/link")
        await sandbox.put_bytes(b"new", "/app/link", mode=0o640)
        found = await ask(sandbox, "cat /tmp/target; stat -c '%F %a' link; cat link")
    same(found, "safe\nregular file 640\nnew", "what was linked to, the file's kind, mode and content")


@section.check("get_bytes reads only small regular files and follows no link; nothing there is FileNotFoundError")
async def only_regular_files(subject: Subject) -> None:
    plants = {
        "/app/link": "echo 1 > /tmp/real; ln -s /tmp/real /app/link",
        "/app/via/real": "ln -s /tmp /app/via",
        "/app/fifo": "mkfifo /app/fifo",
        "/app/folder": "mkdir /app/folder",
        "/app/large": f"head -c {_SMALL + 1} /dev/zero > /app/large",
    }
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "; ".join(plants.values()))
        for path in plants:
            try:
                data = await sandbox.get_bytes(path, max_bytes=_SMALL)
            except ValueError:
                continue
            raise Unmet(f"{path}: read as {data[:20]!r}")
        for path in ("/app/no", "/no/such/file"):
            try:
                data = await sandbox.get_bytes(path, max_bytes=_SMALL)
            except FileNotFoundError:
                continue
            raise Unmet(f"{path}: read as {data[:20]!r}")


@section.check("what cannot be written is an error and leaves nothing")
async def cannot_be_written(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        large = [("/app/big", b"x" * (100 << 20))] if "files" in subject.provider.limits else []
        for target, data in (("relative", b"x"), ("/etc/passwd/x", b"x"), *large):
            try:
                await sandbox.put_bytes(data, target)
            except CommandError:
                continue
            raise Unmet(f"{len(data)} bytes to {target} gave no error")
        same(await ask(sandbox, "ls -A /app"), "", "files in /app")


@section.check("the verify window shows read-only tests and an empty /logs/verifier, whatever was there")
async def verify_window(subject: Subject) -> None:
    with _folder() as here:
        (here / "data").mkdir()
        (here / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        (here / "test.sh").chmod(0o600)
        (here / "data/expected").write_text("42")
        (here / "skip.me").write_text("")
        async with subject.sandbox() as sandbox:
            await ask(sandbox, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; ln -s / /logs/verifier/r")
            await sandbox.open_verify_window(here, exclude=frozenset({"skip.me"}))
            found = await ask(sandbox, "ls -A /logs/verifier; cd /tests; find . | sort | xargs; cat data/expected")
            same(found, ". ./data ./data/expected ./test.sh\n42", "/logs/verifier and /tests")
            await refused(sandbox, "echo x >> /tests/test.sh", "rm /tests/test.sh", "touch /tests/conftest.py")
            same((await sandbox.exec("bash /tests/test.sh", timeout_s=EXEC_S)).exit_code, 0, "exit code of the tests")
            same(await sandbox.get_bytes("/logs/verifier/reward.txt", max_bytes=_SMALL), b"1\n", "the reward")
            await sandbox.close_verify_window()
            same(await ask(sandbox, "ls -A /tests"), "", "/tests after the window")


@section.check("a link, file or fifo planted at /logs/verifier is replaced")
async def planted_logs(subject: Subject) -> None:
    plants = ("ln -s /tmp /logs/verifier", "echo x > /logs/verifier", "mkfifo /logs/verifier")
    with _folder() as here:
        async with subject.sandbox() as sandbox:
            for plant in plants:
                await ask(sandbox, f"rm -rf /logs/verifier; {plant}; echo 1 > /tmp/reward.txt")
                await sandbox.open_verify_window(here)
                found = await ask(sandbox, "stat -c %F /logs/verifier; ls -A /logs/verifier")
                same(found, "directory\n", f"/logs/verifier after {plant!r}")


@section.check("what is planted at /tests before the window is not in it")
async def planted_tests(subject: Subject) -> None:
    plants = ("mkdir -p /tests && echo x > /tests/conftest.py", "rmdir /tests; mkdir /tmp/t; ln -sfn /tmp/t /tests")
    with _folder() as here:
        (here / "test.sh").write_text("true\n")
        for plant in plants:
            async with subject.sandbox() as sandbox:
                await sandbox.exec(plant, timeout_s=EXEC_S)
                await sandbox.open_verify_window(here)
                found = await ask(sandbox, "stat -c %F /tests; ls -A /tests; ls -A /tmp/t 2>/dev/null")
                same(found, "directory\ntest.sh\n", f"/tests after {plant!r}")
