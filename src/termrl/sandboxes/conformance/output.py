"""What comes back of a command's output, and what that costs this process."""

from __future__ import annotations

import os
from pathlib import Path

from termrl.sandboxes.base import DEFAULT_OUTPUT_LIMIT
from termrl.sandboxes.conformance.check import EXEC_S, Section, Subject, need, same

section = Section("output")

_FLOOD = 300_000_000
_COST = 24 << 20


def _resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@section.check("300 MB of output cost bounded memory; head and tail are kept around a mark", within_s=90, alone=True)
async def flood(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        before = _resident_bytes()
        command = f"echo first; head -c {_FLOOD} /dev/zero | tr '\\0' y; echo; echo last"
        result = await sandbox.exec(command, timeout_s=80)
        cost = _resident_bytes() - before
    need(cost < _COST, f"{_FLOOD} bytes of output cost this process {cost >> 20} MiB")
    need(result.output.startswith("first\nyyy"), f"the head is lost: {result.output[:20]!r}")
    need(result.output.endswith("yyy\nlast\n"), f"the tail is lost: {result.output[-20:]!r}")
    need(str(result.truncated_bytes) in result.output, "no mark says how many bytes are gone")
    kept = len(result.output) - len(f"\n[... {result.truncated_bytes} bytes of output left out ...]\n")
    need(kept <= DEFAULT_OUTPUT_LIMIT, f"{kept} bytes are kept, more than the limit of {DEFAULT_OUTPUT_LIMIT}")
    same(kept + result.truncated_bytes, _FLOOD + len("first\n\nlast\n"), "bytes kept and bytes gone")


@section.check("a larger output limit is honoured")
async def larger_limit(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec("seq 200000", timeout_s=EXEC_S, output_limit=4 << 20)
        need(result.output == "".join(f"{number}\n" for number in range(1, 200001)), "the output differs")
        same(result.truncated_bytes, 0, "truncated bytes")


@section.check("invalid UTF-8 is replaced, never raised")
async def invalid_utf8(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec("printf 'a\\377\\376b'; head -c 999 /dev/urandom", timeout_s=EXEC_S)
        same(result.output[:4], "a\ufffd\ufffdb", "the first characters")


@section.check("what had come when the time was up is returned, cut like any output")
async def flood_until_timeout(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec("echo first; yes", timeout_s=0.5)
        need(result.timed_out and result.output.startswith("first\ny\n"), "the head is lost")
        need(result.truncated_bytes > 0, "nothing is said to be gone")


@section.check("a flood from the background is slowed and does not disturb later commands", alone=True)
async def background_flood(subject: Subject) -> None:
    ticks = "cut -d' ' -f14,15 /proc/$(cat /tmp/pid)/stat"
    async with subject.sandbox() as sandbox:
        await sandbox.exec("yes & echo $! > /tmp/pid", timeout_s=EXEC_S)
        await sandbox.exec("sleep 0.3", timeout_s=EXEC_S)
        before = (await sandbox.exec(ticks, timeout_s=EXEC_S)).output.split()
        await sandbox.exec("sleep 1", timeout_s=EXEC_S)
        after = await sandbox.exec(f"{ticks}; echo ok", timeout_s=EXEC_S)
        *used, word = after.output.split()
        same(word, "ok", "output of a later command")
        spent = sum(map(int, used)) - sum(map(int, before))
        need(spent < 60, f"it uses {spent} of 100 ticks of a second")
