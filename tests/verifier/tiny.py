"""A tiny task, written out as a folder, for tests that need a real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from termrl.sandboxes import open_provider
from termrl.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from termrl.tasks.task import Task
from termrl.verifier.tamper import Baseline, take_baseline

SECRET = "forty-two-5f1c"

CHECK = """\
#!/bin/bash
if [ "$(cat answer.txt 2>/dev/null)" = "$(cat /tests/expected.txt)" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo "answer.txt does not hold the answer"
  echo 0 > /logs/verifier/reward.txt
fi
"""

SOLVE = f"""\
#!/bin/bash
echo {SECRET} > answer.txt
"""


def tiny_task(
    folder: Path,
    *,
    id: str = "tiny",
    test: str = CHECK,
    solution: str | None = SOLVE,
    files: Mapping[str, str] | None = None,
    spec: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Task:
    """Write the task below ``folder`` and load it by hand; ``spec`` and ``fields`` override what it says."""
    root = folder / id
    for name, text in {"tests/test.sh": test, "tests/expected.txt": SECRET + "\n"}.items():
        _write(root / name, text)
    (root / "environment").mkdir(parents=True)
    for name, text in (files or {}).items():
        _write(root / "environment" / name, text)
    if solution is not None:
        _write(root / "solution" / "solve.sh", solution)
    sandbox = SandboxSpec(
        task_id=id,
        host_userland=True,
        files=root / "environment",
        memory_mb=256,
        storage_mb=64,
        **{"pids": 256, **(spec or {})},
    )
    fields = {"verifier_timeout_s": 20.0, "agent_timeout_s": 60.0, **fields}
    return Task(
        id=id,
        path=root,
        instruction="Write the answer to answer.txt.",
        tests=root / "tests",
        solution=None if solution is None else root / "solution",
        sandbox=sandbox,
        **fields,
    )


@asynccontextmanager
async def tiny_provider() -> AsyncIterator[SandboxProvider]:
    """A real bubblewrap provider that is closed, with nothing left alive, at the end."""
    async with open_provider("bubblewrap") as provider:
        yield provider
    assert provider.live == 0


@asynccontextmanager
async def sandbox_of(provider: SandboxProvider, task: Task) -> AsyncIterator[Sandbox]:
    """A sandbox of ``task`` for the length of a block."""
    sandbox = await provider.create(task.sandbox)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


@asynccontextmanager
async def handed_over(provider: SandboxProvider, task: Task) -> AsyncIterator[tuple[Sandbox, Baseline]]:
    """A sandbox as a policy gets it: what changes from now on is the policy's doing."""
    async with sandbox_of(provider, task) as sandbox:
        baseline = await take_baseline(sandbox, task)
        # The kernel's clock for files ticks every few milliseconds.
        await asyncio.sleep(0.02)
        yield sandbox, baseline


async def run(sandbox: Sandbox, command: str, *, timeout_s: float = 20.0) -> str:
    """What the policy would do: run a command, whatever comes of it."""
    return (await sandbox.exec(command, timeout_s=timeout_s)).output


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
