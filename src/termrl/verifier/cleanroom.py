"""The clean room: the policy's workdir, and nothing else of its sandbox, in an untouched sandbox of the task."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from termrl.errors import CommandError, TaskError
from termrl.sandboxes.base import Sandbox
from termrl.tasks.task import Task
from termrl.verifier.causes import Cause
from termrl.verifier.tamper import take_baseline
from termrl.verifier.verdict import Verdict
from termrl.verifier.verify import verify

MAX_COPY_BYTES = 256 * 1024 * 1024

_CALL_S = 30.0


async def verify_in_clean_room(
    sandbox: Sandbox, task: Task, *, fresh: Callable[[], Awaitable[Sandbox]], timeout_s: float | None = None
) -> Verdict:
    """Copy the workdir out of ``sandbox`` into the one that ``fresh`` gives, and verify there.

    Args:
        fresh: starts an untouched sandbox; called once the copy is out, so it may stop ``sandbox`` first. What it
            gives is stopped here.

    Returns:
        The verdict there; no verdict (verifier_crash) if the workdir cannot be copied, for instance because it is
        over :data:`MAX_COPY_BYTES`.

    Raises:
        SandboxError: a sandbox was lost or could not be started.
    """
    workdir = sandbox.workdir
    with tempfile.TemporaryDirectory(prefix="termrl-clean-room-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        try:
            await _check_size(sandbox, workdir)
            await sandbox.get(workdir, tree)
        except (CommandError, ValueError, OSError) as error:
            return _uncopied(error)
        other = await fresh()
        try:
            baseline = await take_baseline(other, task)
            empty = 'find . -mindepth 1 -maxdepth 1 -exec rm -rf -- "{}" +'
            result = await other.exec(empty, timeout_s=_CALL_S, clean_env=True)
            if result.exit_code != 0:
                return _uncopied(f"the untouched workdir cannot be emptied: {result.output[:200]}")
            await other.put(tree, workdir)
            return await verify(other, task, timeout_s=timeout_s, baseline=baseline)
        except (CommandError, TaskError, ValueError, OSError) as error:
            return _uncopied(error)
        finally:
            await other.stop()


async def _check_size(sandbox: Sandbox, workdir: str) -> None:
    """Sparse files count in full: that is what a copy of them costs."""
    script = (
        'find . -type f -printf "%s\\n" | { total=0; while read -r n; do total=$((total + n)); done; echo $total; }'
    )
    result = await sandbox.exec(script, timeout_s=_CALL_S, cwd=workdir, clean_env=True)
    if not result.output.strip().isdecimal() or int(result.output) > MAX_COPY_BYTES:
        raise ValueError(f"{workdir}: more than {MAX_COPY_BYTES} bytes, or unreadable")


def _uncopied(why: object) -> Verdict:
    return Verdict.missing(Cause.VERIFIER_CRASH, f"the workdir could not be taken into the clean room: {why}")
