"""Nothing outlives its owner: real processes, really killed."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import termrl
from termrl.errors import SandboxStartError, TermrlError
from termrl.sandboxes import open_provider
from termrl.sandboxes.conformance.check import NotHere, Section, Subject, Unmet, ask, need, same

section = Section("leaks")

_SANDBOXES = 20
_DAEMONS = 2
_SETTLE_S = 10.0


def _sleepers(seconds: str) -> int:
    """Processes on this machine that are ``sleep seconds``."""
    line = f"sleep\0{seconds}\0".encode()
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes() == line
        except OSError:
            continue
    return count


def _nonce() -> str:
    return f"{1000 + secrets.randbelow(10**6) / 10**6:.6f}"


async def _settles(condition: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + _SETTLE_S
    while not condition():
        if time.monotonic() > give_up:
            return False
        await asyncio.sleep(0.02)
    return True


@section.check("stop ends daemons and leaves nothing of this process's: descriptors, threads, children", alone=True)
async def stop_leaves_nothing(subject: Subject) -> None:
    seconds = _nonce()
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "true")
    before = _own()
    for _ in range(3):
        async with subject.sandbox() as sandbox:
            await ask(sandbox, f"setsid sleep {seconds} >/dev/null 2>&1 &")
            need(await _settles(lambda: _sleepers(seconds) == 1), "the daemon cannot be seen on this machine")
        need(await _settles(lambda: _sleepers(seconds) == 0), "a daemon outlives its sandbox")
    same(_own(), before, "descriptors, threads and children of this process")
    same(subject.provider.live, 0, "live sandboxes")


@section.check("a create that fails or is cancelled leaves nothing", alone=True)
async def failing_create(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await ask(sandbox, "true")
    before = _own()
    try:
        sandbox = await subject.provider.create(replace(subject.spec, workdir="/proc/not/writable"))
    except SandboxStartError:
        pass
    else:
        await sandbox.stop()
        raise Unmet("a sandbox with the workdir /proc/not/writable was made")
    for delay in (0.0, 0.002, 0.01):
        create = asyncio.create_task(subject.provider.create(subject.spec))
        await asyncio.sleep(delay)
        create.cancel()
        try:
            sandbox = await create
        except asyncio.CancelledError:
            continue
        await sandbox.stop()
    same(subject.provider.live, 0, "live sandboxes")
    same(_own(), before, "descriptors, threads and children of this process")


@section.check(
    "SIGKILL of an owner of 20 sandboxes with 40 daemons leaves nothing after a sweep", within_s=90, alone=True
)
async def killed_then_swept(subject: Subject) -> None:
    await _killed(subject, subject.provider.sweep)


@section.check(
    "SIGKILL of an owner of 20 sandboxes with 40 daemons leaves nothing once another starts", within_s=90, alone=True
)
async def killed_then_next_start(subject: Subject) -> None:
    async def start_and_close() -> None:
        async with open_provider(subject.backend or "", **subject.settings) as provider:
            await (await provider.create(subject.spec)).stop()

    def start() -> None:
        asyncio.run(start_and_close())

    await _killed(subject, start)


async def _killed(subject: Subject, clean: Callable[[], object]) -> None:
    """Kill another process that owns sandboxes, clean up, and look for what is left."""
    if subject.backend is None:
        raise NotHere("how to open this backend in another process is not known")
    seconds = _nonce()
    owner = await asyncio.to_thread(_start_owner, subject, seconds)
    try:
        wanted = _SANDBOXES * _DAEMONS
        need(await _settles(lambda: _sleepers(seconds) == wanted), f"not all of {wanted} daemons run")
        await asyncio.to_thread(subject.provider.sweep)
        same(_sleepers(seconds), wanted, "daemons after a sweep while their owner lives")
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    await asyncio.to_thread(clean)
    need(await _settles(lambda: _sleepers(seconds) == 0), f"{_sleepers(seconds)} daemons are left")
    same(await asyncio.to_thread(subject.provider.remains), [], "what dead owners have left")


def _start_owner(subject: Subject, seconds: str) -> subprocess.Popen[str]:
    """Another process that owns sandboxes with daemons in each, once all of them run."""
    spec = replace(subject.spec, files=None)
    facts = {
        "backend": subject.backend,
        "settings": dict(subject.settings),
        "spec": {**spec.__dict__, "env": dict(spec.env)},
        "sandboxes": _SANDBOXES,
        "daemons": _DAEMONS,
        "seconds": seconds,
    }
    owner = subprocess.Popen(
        [sys.executable, "-m", "termrl.sandboxes.conformance.owner", json.dumps(facts)],
        env={**os.environ, "PYTHONPATH": str(Path(termrl.__file__).parents[1])},
        stdin=subprocess.PIPE,  # closed when nobody holds the process any more: the check may be cancelled
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    if owner.stdout.readline() != "up\n":
        owner.kill()
        raise TermrlError(f"the other owner ended with {owner.wait()}")
    return owner


def _own() -> tuple[int, int, int]:
    """Descriptors, threads and children of this process; idle threads of the event loop's pool are not counted."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), len(threads), len(children)  # noqa: PTH208
