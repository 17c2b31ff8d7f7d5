"""Running a task's own tests in a sandbox and saying what they said.

The policy is an adversary: its processes are gone before the tests appear, the tests get a clean environment and
a home directory that did not exist before, and the reward is read by the host as a small regular file.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from termrl.errors import CommandError, SandboxError
from termrl.sandboxes.base import ExecResult, Sandbox
from termrl.tasks.ignore import excluded_paths
from termrl.tasks.task import Task
from termrl.verifier.bootstrap import bootstrap_failure, downloads_in, mentions
from termrl.verifier.redaction import Redactor
from termrl.verifier.reward import MAX_REWARD_BYTES, parse_reward_json, parse_reward_txt
from termrl.verifier.signals import Signal
from termrl.verifier.surroundings import LOGS, verifier_environment
from termrl.verifier.tamper import (
    Baseline,
    Changes,
    look_at_files,
    look_at_processes,
    remove_test_config,
    restore_downloads,
)
from termrl.verifier.verdict import Cause, Verdict

TEST_SCRIPT = "/tests/test.sh"
TEST_OUTPUT = f"{LOGS}/test-stdout.txt"
REWARD_FILES = {f"{LOGS}/reward.json": parse_reward_json, f"{LOGS}/reward.txt": parse_reward_txt}

KEEP_SERVICES = "termrl_keep_services"

_PRELOAD = "/etc/ld.so.preload"
_TAIL_BYTES = 8 * 1024
_HANG_GRACE_S = 5.0
_CLEANUP_S = 5.0

# $BASH is the shell that runs this, as the sandbox started it: no PATH look-up is involved. Where the policy has
# spoilt /tmp, the home goes into the folder that was just made for the verifier. curl looks for its settings in the
# account's own home too, unless it finds some before.
_DRIVER = f"""\
mkdir -m 700 -- "$HOME" 2>/dev/null || {{ HOME={LOGS}/.home && mkdir -m 700 -- "$HOME"; }} || exit
: >"$HOME/.curlrc"
"$BASH" {TEST_SCRIPT} >{TEST_OUTPUT} 2>&1 </dev/null
code=$?
tail -c {_TAIL_BYTES} -- {TEST_OUTPUT}
rm -rf -- "$HOME"
exit $code
"""


@dataclass
class _Evidence:
    """What is known so far; goes into the verdict whatever happens."""

    started: float
    exit_code: int | None = None
    output: str = ""
    signals: dict[str, Any] = field(default_factory=dict)
    exposed: bool = False

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def fields(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "output_tail": self.output[-_TAIL_BYTES:],
            "duration_s": self.elapsed,
            "signals": {str(name): value for name, value in self.signals.items()},
            "integrity": "exposed" if self.exposed else "sealed",
        }


async def verify(
    sandbox: Sandbox, task: Task, *, timeout_s: float | None = None, baseline: Baseline | None = None
) -> Verdict:
    """Run the task's tests in ``sandbox`` and read the reward they wrote.

    Every process that the policy left is stopped and killed first, unless the task says
    ``[metadata] termrl_keep_services = true``: then they live on through the tests, and if there are any the
    verdict's integrity is ``exposed``, because they could read the tests and reach the reward.

    test.sh runs from the task's workdir with bash, by its absolute path, its output in
    ``/logs/verifier/test-stdout.txt``. Its exit code decides nothing. ``reward.json`` counts before
    ``reward.txt``. When this returns, the tests and ``/logs/verifier`` are gone again.

    Args:
        timeout_s: budget in seconds for upload, tests and download together; the task's own when ``None``.
            A timeout is no verdict, even if a reward was written.
        baseline: how the sandbox was handed over to the policy. With it, what changed since then is looked at:
            it goes into the verdict's signals, folders of PATH that changed come last, new pytest configuration
            above the tests is removed, and where the tests download, the files that say from where are put back.

    Returns:
        passed or failed with the raw reward, or no verdict with one of the causes sandbox_lost,
        verifier_timeout, bootstrap_failed, bad_reward, verifier_crash. Values that the task's variables take from the
        host stand nowhere in it.

    Raises:
        TaskError: ``[verifier] env`` names a host variable that is not set.
    """
    budget = task.verifier_timeout_s if timeout_s is None else timeout_s
    env = verifier_environment(sandbox.spec, task)
    evidence = _Evidence(started=time.monotonic())
    try:
        async with asyncio.timeout(budget + _HANG_GRACE_S):
            verdict = await _run_tests(sandbox, task, env, budget, evidence, baseline)
    except TimeoutError:
        verdict = _timed_out(budget, evidence)
    except SandboxError as error:
        verdict = Verdict.missing(Cause(error.cause), error.message, **evidence.fields())
    finally:
        await _take_tests_away(sandbox)
    return Redactor(task).verdict(verdict, cut_start=len(evidence.output.encode()) >= _TAIL_BYTES)


async def _run_tests(
    sandbox: Sandbox,
    task: Task,
    env: dict[str, str],
    budget: float,
    evidence: _Evidence,
    baseline: Baseline | None,
) -> Verdict:
    keep_services = task.metadata.get(KEEP_SERVICES) is True
    try:
        if baseline is not None:
            evidence.signals |= await look_at_processes(sandbox)
        if not keep_services:
            await sandbox.kill_all()
        else:
            evidence.signals.pop(Signal.KILLED, None)
        planted = await _reward_files_present(sandbox)
        if planted:
            evidence.signals[Signal.PLANTED_REWARD] = planted
        await _disarm_preload(sandbox, evidence)
        if baseline is not None:
            changes = await look_at_files(sandbox, baseline)
            evidence.signals |= changes.signals
            env = verifier_environment(sandbox.spec, task, changes)
            await _undo(sandbox, baseline, changes)
        await sandbox.open_verify_window(task.tests, exclude=excluded_paths(task.tests))
        if await _reward_files_present(sandbox):
            return _missing(Cause.BAD_REWARD, "a reward file stood there before the tests ran", evidence)
        async with _acting_as(sandbox, sandbox.spec.verifier_user):
            result = await sandbox.exec(
                _DRIVER,
                timeout_s=max(budget - evidence.elapsed, 0.001),
                cwd=sandbox.workdir,
                env=env,
                clean_env=True,
                output_limit=2 * _TAIL_BYTES,
            )
        if result.background and not keep_services:
            evidence.signals[Signal.LEFT_BY_TESTS] = result.background
            await sandbox.kill_all()
    except (CommandError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        return _missing(Cause.VERIFIER_CRASH, f"the tests could not be run: {error}", evidence)
    evidence.exit_code, evidence.output = result.exit_code, result.output
    if result.background and keep_services:
        evidence.signals[Signal.KEPT_SERVICES] = result.background
        evidence.exposed = True
    if result.timed_out:
        evidence.output = await _partial_output(sandbox)
        return _timed_out(budget, evidence)
    verdict = await _read_reward(sandbox, task, result, evidence)
    # The download is part of the budget: a reward that came too late is no verdict.
    return _timed_out(budget, evidence) if evidence.elapsed > budget else verdict


@contextlib.asynccontextmanager
async def _acting_as(sandbox: Sandbox, user: str | None) -> AsyncIterator[None]:
    """Let ``user`` run the tests, and write what they find; root otherwise."""
    if not user or user in ("root", "0"):
        yield
        return
    await sandbox.exec(f"chmod 777 -- {LOGS}", timeout_s=_CLEANUP_S, cwd="/", clean_env=True)
    await sandbox.act_as(user)
    try:
        yield
    finally:
        await sandbox.act_as(None)


async def _undo(sandbox: Sandbox, baseline: Baseline, changes: Changes) -> None:
    await remove_test_config(sandbox, changes)
    await restore_downloads(sandbox, baseline)


async def _read_reward(sandbox: Sandbox, task: Task, result: ExecResult, evidence: _Evidence) -> Verdict:
    rewards: list[float] = []
    for path, parse in REWARD_FILES.items():
        try:
            rewards.append(parse(await sandbox.get_bytes(path, max_bytes=MAX_REWARD_BYTES)))
        except FileNotFoundError:
            continue
        except (CommandError, ValueError, OSError) as error:
            if not rewards:
                return _missing(Cause.BAD_REWARD, f"{path} is refused: {error}", evidence)
    if rewards:
        if len(set(rewards)) > 1:
            # Programs of the policy that the tests run can write there as well.
            if mentions(task.tests, b"reward.txt") and not mentions(task.tests, b"reward.json"):
                evidence.signals[Signal.FOREIGN_REWARD] = rewards.pop(0)
            else:
                evidence.signals[Signal.REWARDS_DISAGREE] = rewards
        return Verdict.scored(rewards[0], **evidence.fields())
    line = bootstrap_failure(result.output)
    if line is not None and (task.tests_use_network or downloads_in(task.tests)):
        return _missing(Cause.BOOTSTRAP_FAILED, line, evidence)
    detail = f"the tests wrote no reward (exit status {result.exit_code}{', out of memory' if result.oom else ''})"
    return _missing(Cause.VERIFIER_CRASH, detail, evidence)


def _missing(cause: Cause, detail: str, evidence: _Evidence) -> Verdict:
    return Verdict.missing(cause, detail, **evidence.fields())


def _timed_out(budget: float, evidence: _Evidence) -> Verdict:
    return _missing(Cause.VERIFIER_TIMEOUT, f"no verdict within {budget:g} s", evidence)


async def _reward_files_present(sandbox: Sandbox) -> list[str]:
    present = []
    for path in REWARD_FILES:
        try:
            await sandbox.get_bytes(path, max_bytes=MAX_REWARD_BYTES)
        except FileNotFoundError:
            continue
        except (CommandError, ValueError, OSError):
            pass
        present.append(path)
    return present


async def _disarm_preload(sandbox: Sandbox, evidence: _Evidence) -> None:
    """Empty a planted ``/etc/ld.so.preload``, which would put the policy's code into every program of the tests.

    It is the sandbox that writes, not a program in it: any program would load what is planted.
    """
    try:
        if not await sandbox.get_bytes(_PRELOAD, max_bytes=MAX_REWARD_BYTES):
            return
    except FileNotFoundError:
        return
    except (CommandError, ValueError, OSError):
        pass
    evidence.signals[Signal.LD_SO_PRELOAD] = True
    with contextlib.suppress(CommandError, ValueError, OSError):
        await sandbox.put_bytes(b"", _PRELOAD)


async def _partial_output(sandbox: Sandbox) -> str:
    with contextlib.suppress(CommandError):
        tail = f"tail -c {_TAIL_BYTES} -- {TEST_OUTPUT}"
        return (await sandbox.exec(tail, timeout_s=_CLEANUP_S, cwd="/", clean_env=True)).output
    return ""


async def _take_tests_away(sandbox: Sandbox) -> None:
    """The tests go, and with them what they wrote: their output may spell out what they expect."""
    with contextlib.suppress(SandboxError, CommandError, OSError):
        async with asyncio.timeout(2 * _CLEANUP_S):
            await sandbox.close_verify_window()
            await sandbox.exec(f"rm -rf -- {LOGS}", timeout_s=_CLEANUP_S, cwd="/", clean_env=True)
