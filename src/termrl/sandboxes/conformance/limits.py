"""Every resource that a command can use is bounded, and the sandbox works on after the bound was met."""

from __future__ import annotations

import time

from termrl.sandboxes.base import ExecResult
from termrl.sandboxes.conformance.check import (
    EXEC_S,
    MEMORY_MB,
    PIDS,
    STORAGE_MB,
    NotHere,
    Section,
    Subject,
    ask,
    need,
    python_in,
    same,
    works,
)

section = Section("limits")

# A backend may give small file systems of their own to /etc, /logs, /dev/shm and the like.
_BESIDE_STORAGE_MB = 128
_MAX_FILES = 150_000

_MEMFD = """
import os
held = []
for _ in range(16):
    fd = os.memfd_create("x")
    held.append(fd)
    for _ in range(64):
        os.write(fd, bytes(1 << 20))
print("held", len(held))
import time; time.sleep(1); print("kept")
"""
# Tries to have another killed in its place.
_STANDING = """
for score in ("-1000", "0", "200", "300"):
    try:
        with open("/proc/self/oom_score_adj", "w") as file: file.write(score)
        break
    except OSError: pass
"""
_SYSV = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]
made = 0
for _ in range(16):
    ident = libc.shmget(0, 64 << 20, 0o1600)
    if ident < 0: break
    at = libc.shmat(ident, None, 0)
    if at in (None, ctypes.c_void_p(-1).value): break
    ctypes.memset(at, 1, 64 << 20)
    libc.shmdt(at)
    made += 1
time.sleep(0.5)
rows = [line.split() for line in open("/proc/sysvipc/shm")][1:]
print("kept", sum(int(row[14]) for row in rows) >> 20)
"""


def _ended_by_limit(result: ExecResult) -> bool:
    return result.oom or "emory" in result.output or "No space" in result.output


@section.check("a fork bomb is bounded and the next command works", limit="processes")
async def fork_bomb(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec("f() { f | f & f; }; f", timeout_s=1)
        need(result.timed_out or result.exit_code is not None, "it has neither ended nor timed out")
        await works(sandbox, "a fork bomb")
        left = await ask(sandbox, "set -- /proc/[0-9]*; echo $#")
        need(int(left) <= 4, f"{left.strip()} processes are left")


@section.check("a fork bomb left in the background does not block the next command", limit="processes")
async def fork_bomb_in_background(subject: Subject) -> None:
    bomb = "bomb() { bomb | bomb & }; bomb; for i in $(seq 500); do sleep 300 & done 2>/dev/null"
    async with subject.sandbox() as sandbox:
        await sandbox.exec(bomb, timeout_s=1.2)
        await works(sandbox, "a fork bomb in the background")


@section.check("idle processes cannot pass the limit", limit="processes")
async def idle_processes(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        count = "set -- /proc/[0-9]*; echo $#"
        result = await sandbox.exec(f"for i in $(seq 300); do sleep 30 & {count}; done 2>/dev/null", timeout_s=1.5)
        seen = [int(line) for line in result.output.split() if line.isdigit()]
        need(seen and max(seen) <= PIDS + 4, f"{max(seen, default=0)} processes ran where {PIDS} are allowed")
        need(result.exit_code != 0 or max(seen) < 300, "300 processes could be made")
        await works(sandbox, "many processes")


@section.check("running out of memory ends the command and is told from a plain kill", limit="memory")
async def out_of_memory(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        plain = await sandbox.exec("bash -c 'kill -9 $$'", timeout_s=EXEC_S)
        same((plain.exit_code, plain.oom), (137, False), "exit code and oom of a plain kill")
        hog = "set -o pipefail; head -c 900m /dev/zero | tail -n 1 >/dev/null"
        result = await sandbox.exec(hog, timeout_s=EXEC_S)
        need(result.exit_code not in (0, None), f"900 MB fit into {MEMORY_MB} MiB")
        need(_ended_by_limit(result), f"nothing says that memory ran out: {result}")
        await works(sandbox, "running out of memory")
        same((await sandbox.exec("true", timeout_s=EXEC_S)).oom, False, "oom of the next command")


@section.check("running out of memory never takes the sandbox down, whatever its processes did before", limit="memory")
async def first_process_spared(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        if subject.provider.privileges.first_process_at_risk:
            raise NotHere("this backend says that it cannot keep the first process from that on this machine")
        python = await python_in(sandbox)
        await sandbox.put_bytes((_STANDING + _MEMFD).encode(), "/tmp/hog.py")
        for _ in range(2):
            await sandbox.exec(f"{python} /tmp/hog.py", timeout_s=EXEC_S)
            await works(sandbox, "running out of memory with no large process")


@section.check("many small hogs together are bounded", limit="memory")
async def many_hogs(subject: Subject) -> None:
    # each holds what it has read for a while, or on a busy machine one could end before the next begins
    hog = "{ head -c 100m /dev/zero; sleep 1; } | tail -n 1 | tail -c 0"
    hogs = f"for i in 1 2 3 4 5 6; do {hog} & done; wait; sleep 0.3; echo over"
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec(hogs, timeout_s=EXEC_S)
        need(_ended_by_limit(result), f"600 MB in six processes fit into {MEMORY_MB} MiB")
        await works(sandbox, "many hogs")


@section.check("memory that is held by a descriptor only (memfd) is bounded", limit="memory")
async def memory_files(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        python = await python_in(sandbox)
        await sandbox.put_bytes(_MEMFD.encode(), "/tmp/hog.py")
        result = await sandbox.exec(f"{python} /tmp/hog.py", timeout_s=EXEC_S)
        need("kept" not in result.output, f"1 GiB in memory files is kept where {MEMORY_MB} MiB are allowed")
        await works(sandbox, "memory files")


@section.check("memory of System V segments that nobody has attached is bounded and given back", limit="memory")
async def shared_segments(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        python = await python_in(sandbox)
        await sandbox.put_bytes(_SYSV.encode(), "/tmp/hog.py")
        result = await sandbox.exec(f"{python} /tmp/hog.py", timeout_s=EXEC_S)
        _, _, kept = result.output.partition("kept")
        need(not kept or int(kept) <= MEMORY_MB, f"{kept.strip()} MiB are kept where {MEMORY_MB} are allowed")
        again = await sandbox.exec("sleep 0.3; head -c 20m /dev/zero | tail -n 1 | wc -c", timeout_s=EXEC_S)
        same((again.output.strip(), again.oom), (str(20 << 20), False), "a modest command afterwards")


@section.check(
    "filling every folder that can be written ends in an error, and a reward can still be written", limit="files"
)
async def disk_fill(subject: Subject) -> None:
    folders = "/tmp /var/tmp /app /root /home /run /opt /srv /etc /dev/shm /dev"
    fill = f"for d in {folders}; do head -c 500m /dev/zero > $d/fill; done 2>&1; sync"
    used = f"for d in {folders}; do stat -c %b $d/fill 2>/dev/null; done | paste -sd+ | sed 's/^/(/; s/$/)\\/2048/'"
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec(fill, timeout_s=EXEC_S)
        need("No space" in result.output or result.oom, f"nothing says that space ran out: {result.output[:200]!r}")
        megabytes = int(await ask(sandbox, f"echo $(( $({used}) ))"))
        most = STORAGE_MB + _BESIDE_STORAGE_MB
        need(megabytes <= most, f"{megabytes} MiB could be written where {STORAGE_MB} are allowed")
        await works(sandbox, "filling the disk")
        await sandbox.put_bytes(b"1\n", "/logs/reward.txt")
        same(await sandbox.get_bytes("/logs/reward.txt", max_bytes=9), b"1\n", "a reward on a full disk")
        await ask(sandbox, f"for d in {folders}; do rm -f $d/fill; done")
        same(await ask(sandbox, "echo again > /tmp/x && cat /tmp/x"), "again\n", "writing after making room")


@section.check("a flood of files is cut", within_s=60, limit="file count")
async def file_flood(subject: Subject) -> None:
    flood = "mkdir /tmp/m; cd /tmp/m; i=0; while :; do : > $((i++)); done"
    async with subject.sandbox() as sandbox:
        begin = time.monotonic()
        result = await sandbox.exec(flood, timeout_s=40)
        need(not result.timed_out, "files can be made for 40 s")
        need(result.exit_code != 0, f"it ended by itself in {time.monotonic() - begin:.0f} s")
        count = int(await ask(sandbox, "ls -U /tmp/m | wc -l"))
        need(count <= _MAX_FILES, f"{count} files could be made")
        await works(sandbox, "a flood of files")


@section.check("open files are bounded and nothing dumps core", limit="open files")
async def open_files(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        files, core = (await ask(sandbox, "ulimit -Hn; ulimit -Hc")).split()
        need(files != "unlimited" and int(files) <= 1 << 20, f"a process may open {files} files")
        same(core, "0", "largest core dump")


@section.check("CPU time is shared out as the spec says", limit="cpus")
async def cpu_share(subject: Subject) -> None:
    async with subject.sandbox(cpus=0.2) as sandbox:
        result = await sandbox.exec("(while :; do :; done) & sleep 1.5; kill %1 $!; wait; times", timeout_s=EXEC_S)
        minutes, _, rest = result.output.split()[-2].partition("m")
        seconds = int(minutes) * 60 + float(rest.rstrip("s"))
        need(seconds <= 0.6, f"a spinner used {seconds} s of 1.5 s with 0.2 CPUs")
