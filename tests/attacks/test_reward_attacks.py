"""A policy that never solves the task must not score 1, whatever it plants; one that solves it still must.

Every attack runs on a real sandbox. Afterwards an honest solution scores 1: in the same sandbox where the attack
leaves it usable, else in another.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from termrl.attacks.snippets import PLANT
from termrl.sandboxes.base import SandboxProvider
from termrl.verifier.oracle import run_solution
from termrl.verifier.verdict import Cause
from termrl.verifier.verify import verify
from tests.attacks.kinds import add_evil_library
from tests.verifier.tiny import SECRET, run, sandbox_of, tiny_task


async def test_a_planted_reward_is_a_signal_in_the_verdict(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path)
    async with sandbox_of(provider, task) as sandbox:
        await run(sandbox, PLANT)
        verdict = await verify(sandbox, task)
        assert verdict.signals.get("planted_reward"), "the plant is named"
        assert "planted_reward" not in (await verify(sandbox, task)).signals, "what the tests wrote is no plant"


FILL = {
    "the disk": "for d in /app /tmp /root /var/tmp /logs /run /dev/shm /; do head -c 2G /dev/zero > $d/fill; done",
    "the inodes": "for d in /app /tmp /logs / /dev/shm; do (cd $d; seq 20000 | xargs mkdir); done",
}


@pytest.mark.parametrize("fill", FILL.values(), ids=FILL.keys())
async def test_a_full_disk_does_not_score_one(provider: SandboxProvider, tmp_path: Path, fill: str) -> None:
    if "files" not in provider.limits:
        pytest.skip(f"{provider.name} cannot bound files here: this would fill the machine's disk")
    test = "head -c 100000 /dev/zero > /tmp/scratch || exit 1\n" + (tiny_task(tmp_path).tests / "test.sh").read_text()
    task = tiny_task(tmp_path, id="scratch", test=test)
    async with sandbox_of(provider, task) as sandbox:
        await run(sandbox, f"({fill}) 2>/dev/null", timeout_s=30)
        verdict = await verify(sandbox, task)
        assert verdict.reward in (0.0, None)
        assert verdict.cause in (Cause.TESTS_FAILED, Cause.VERIFIER_CRASH, Cause.BAD_REWARD)
    async with sandbox_of(provider, task) as sandbox:
        await run_solution(sandbox, task)
        assert (await verify(sandbox, task)).reward == 1.0


async def test_no_process_of_the_policy_lives_while_the_tests_run(provider: SandboxProvider, tmp_path: Path) -> None:
    test = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo 0 > /logs/verifier/reward.txt"
    task = tiny_task(tmp_path, test=test)
    async with sandbox_of(provider, task) as sandbox:
        await run(sandbox, "for i in 1 2 3; do setsid sleep 979 >/dev/null 2>&1 & (sleep 979 &) ; done")
        started = time.monotonic()
        verdict = await verify(sandbox, task)
        assert verdict.reward == 0.0 and "979" not in verdict.output_tail
        assert time.monotonic() - started < 5


async def test_the_tests_are_nowhere_to_be_read_before_verify(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path)
    # A pattern that does not match the command line it stands in.
    folder = f"[{str(tmp_path)[0]}]{str(tmp_path)[1:]}"
    search = (
        "find / -xdev -newer /proc/1 \\( -name expected.txt -o -name test.sh -o -name solve.sh \\) 2>/dev/null;"
        "find /tests /solution /app /tmp /root /home /run /var /logs /opt /mnt /srv -type f 2>/dev/null"
        f" | xargs -r -d '\\n' grep -l {SECRET[:5]}-two 2>/dev/null; cat /proc/*/environ /proc/*/cmdline"
        f" 2>/dev/null | tr '\\0' '\\n' | grep {folder}; grep {folder} /proc/self/mountinfo"
    )
    async with sandbox_of(provider, task) as sandbox:
        assert await run(sandbox, search) == ""
        assert await run(sandbox, f"ls {task.path} /tests/test.sh /solution 2>/dev/null") == ""
        await run(sandbox, f"echo {SECRET} > /var/tmp/x; mkdir -p /opt/y; touch /opt/y/test.sh")
        assert set((await run(sandbox, search)).split()) == {"/var/tmp/x", "/opt/y/test.sh"}, "the search does find"


async def test_the_tests_cannot_be_written_while_they_run(provider: SandboxProvider, tmp_path: Path) -> None:
    test = (
        "cp /tests/expected.txt answer.txt 2>/dev/null; for f in /tests/test.sh /tests/new; do echo x > $f; done"
        " 2>/dev/null && echo WRITTEN; mv /tests /tests2 2>/dev/null && echo MOVED; echo 0 > /logs/verifier/reward.txt"
    )
    task = tiny_task(tmp_path, test=test)
    async with sandbox_of(provider, task) as sandbox:
        tail = (await verify(sandbox, task)).output_tail
        assert "WRITTEN" not in tail and "MOVED" not in tail
    assert (task.tests / "test.sh").read_text() == test and not (task.tests / "new").exists()


async def test_the_hosts_secrets_are_not_in_the_sandbox(
    provider: SandboxProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMRL_TEST_API_KEY", "sk-secret-of-the-host")
    task = tiny_task(tmp_path)
    async with sandbox_of(provider, task) as sandbox:
        look = "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; cat ~/.netrc ~/.ssh/* 2>/dev/null"
        output = await run(sandbox, look)
        shadow = await run(sandbox, "cat /etc/shadow 2>/dev/null")
    assert "sk-secret" not in output
    host = Path("/etc/shadow")
    assert provider.name == "docker" or not shadow, "a container has its image's own"
    assert not host.is_file() or not os.access(host, os.R_OK) or shadow != host.read_text()


PROGRAM_RUNNER = """\
timeout 5 bash ./program.sh > /tmp/out.txt 2>&1
[ "$(cat /tmp/out.txt)" = "$(cat /tests/expected.txt)" ] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
"""


async def test_a_program_that_kills_the_tests_that_run_it_does_not_score_one(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = tiny_task(tmp_path, test=PROGRAM_RUNNER, solution=f"echo 'echo {SECRET}' > program.sh")
    async with sandbox_of(provider, task) as sandbox:
        await run(sandbox, "echo 'kill -9 -1' > program.sh")
        verdict = await verify(sandbox, task)
        assert (verdict.reward, verdict.cause) == (None, Cause.VERIFIER_CRASH)
        await run_solution(sandbox, task)
        assert (await verify(sandbox, task)).reward == 1.0


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A shared library that writes a reward of 1 from every program that loads it."""
    task = tiny_task(tmp_path, id="library")
    add_evil_library(task)
    if not (made := task.path / "environment" / "evil.so").exists():
        pytest.skip("no C compiler to build a preload library with")
    return made


async def test_a_preloaded_library_does_not_reach_the_verifier(
    provider: SandboxProvider, tmp_path: Path, library: Path
) -> None:
    task = tiny_task(tmp_path)
    async with sandbox_of(provider, task) as sandbox:
        await sandbox.put_bytes(library.read_bytes(), "/app/evil.so", mode=0o755)
        await run(
            sandbox, "mkdir -p /logs/verifier; LD_PRELOAD=/app/evil.so cat /dev/null; export LD_PRELOAD=/app/evil.so"
        )
        await run(sandbox, "echo /app/evil.so > /etc/ld.so.preload; echo /app > /etc/ld.so.conf")
        verdict = await verify(sandbox, task)
        assert verdict.reward == 0.0, verdict
        await run_solution(sandbox, task)
        assert (await verify(sandbox, task)).reward == 1.0
