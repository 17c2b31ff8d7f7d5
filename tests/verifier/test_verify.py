"""The scoring rules, each on a real sandbox."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from termrl.errors import TaskError
from termrl.sandboxes.base import SandboxProvider
from termrl.verifier.oracle import golden_check, run_solution
from termrl.verifier.surroundings import trusted_path
from termrl.verifier.verdict import Cause, Outcome, Verdict
from termrl.verifier.verify import verify
from tests.verifier.tiny import SECRET, run, sandbox_of, tiny_task


async def verdict_of(provider: SandboxProvider, folder: Path, test: str, **fields: object) -> Verdict:
    task = tiny_task(folder, test=test, **fields)  # type: ignore[arg-type]
    async with sandbox_of(provider, task) as sandbox:
        return await verify(sandbox, task)


async def test_a_task_scores_one_after_its_solution_and_zero_after_nothing(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    check = await golden_check(provider, tiny_task(tmp_path))
    assert check.sound
    assert (check.oracle.reward, check.oracle.raw_reward, check.oracle.cause) == (1.0, 1.0, None)
    assert (check.nop.reward, check.nop.cause) == (0.0, Cause.TESTS_FAILED)
    assert "does not hold the answer" in check.nop.output_tail
    assert check.oracle.integrity == "sealed" and check.oracle.signals == {}
    assert 0 < check.oracle.duration_s < 20


async def test_a_solution_that_exits_nonzero_is_noted_and_the_tests_run_all_the_same(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    solution = f'[ "$DEBIAN_FRONTEND" = noninteractive ] && echo {SECRET} > answer.txt; exit 3'
    check = await golden_check(provider, tiny_task(tmp_path, solution=solution))
    assert check.solution.exit_code == 3 and check.sound


async def test_a_task_without_a_solution_has_no_golden_check(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, solution=None)
    async with sandbox_of(provider, task) as sandbox:
        with pytest.raises(TaskError, match=r"solve\.sh"):
            await run_solution(sandbox, task)


@pytest.mark.parametrize(
    ("test", "raw_reward"),
    [
        ("echo 1 > /logs/verifier/reward.txt; exit 1", 1.0),
        ("echo 0 > /logs/verifier/reward.txt; exit 0", 0.0),
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ("""echo '{"reward": 1}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt""", 1.0),
        ("""echo '{"score": 0.5}' > /logs/verifier/reward.json""", 0.5),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", 1.0),
    ],
    ids=["exit 1", "exit 0", "fraction", "json before txt", "only key", "killed after writing"],
)
async def test_the_reward_file_decides_and_the_exit_code_does_not(
    provider: SandboxProvider, tmp_path: Path, test: str, raw_reward: float
) -> None:
    verdict = await verdict_of(provider, tmp_path, test)
    assert verdict.raw_reward == raw_reward
    assert verdict.reward == (1.0 if raw_reward == 1 else 0.0)
    assert verdict.outcome is (Outcome.PASSED if raw_reward == 1 else Outcome.FAILED)


@pytest.mark.parametrize(
    ("test", "cause"),
    [
        ("true", Cause.VERIFIER_CRASH),
        ("exit 1", Cause.VERIFIER_CRASH),
        ("if then", Cause.VERIFIER_CRASH),
        ("kill -9 $$", Cause.VERIFIER_CRASH),
        (": > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("echo nan > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("echo 1.5 > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("echo yes > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("echo '{' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        (""": > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt""", Cause.BAD_REWARD),
        ("echo 1 > /tmp/one; ln -s /tmp/one /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("mkfifo /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("mkdir /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("ln -s /nowhere /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("printf '%5000s' 1 > /logs/verifier/reward.txt", Cause.BAD_REWARD),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
async def test_a_reward_that_cannot_be_trusted_is_no_verdict(
    provider: SandboxProvider, tmp_path: Path, test: str, cause: Cause
) -> None:
    verdict = await verdict_of(provider, tmp_path, test)
    assert (verdict.outcome, verdict.cause, verdict.reward, verdict.raw_reward) == (
        Outcome.NO_VERDICT,
        cause,
        None,
        None,
    )
    assert verdict.detail


SURROUNDINGS = """\
{ pwd; stat -c '%a %u' "$HOME"; cat "$HOME"/.[!.]* | wc -c; id -u; echo "$HOME"; } > /logs/verifier/seen.txt
[ -s /logs/verifier/test-stdout.txt ] && echo "early" ; echo a line; [ -s /logs/verifier/test-stdout.txt ] && echo kept
cat /logs/verifier/seen.txt
echo 1 > /logs/verifier/reward.txt
"""


async def test_the_tests_run_in_the_workdir_with_a_new_private_home_and_their_output_in_a_file(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = tiny_task(tmp_path, test=SURROUNDINGS)
    async with sandbox_of(provider, task) as sandbox:
        first = await verify(sandbox, task)
        second = await verify(sandbox, task)
        lines = first.output_tail.splitlines()
        assert lines[:5] == ["a line", "kept", "/app", "700 0", "0"]
        homes = [verdict.output_tail.splitlines()[-1] for verdict in (first, second)]
        assert homes[0] != homes[1] and "/root" not in homes
        assert await run(sandbox, f"ls -d {' '.join(homes)} 2>/dev/null") == ""


async def test_the_tests_see_the_tasks_and_the_verifiers_variables_and_nothing_of_the_policys(
    provider: SandboxProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMRL_TEST_TOKEN", "from-the-host")
    monkeypatch.setenv("TERMRL_TEST_SECRET", "must-not-leak")
    task = tiny_task(
        tmp_path,
        test="env; echo LENGTH=${#TOKEN}; echo 1 > /logs/verifier/reward.txt",
        spec={"env": {"OF_THE_IMAGE": "yes", "PATH": "/app/bin:relative::/usr/bin:/bin"}},
        verifier_env={"TOKEN": "${TERMRL_TEST_TOKEN}", "LITERAL": "a ${B} c"},
    )
    async with sandbox_of(provider, task) as sandbox:
        await run(sandbox, "export PLANTED=1; echo export PLANTED=1 | tee ~/.bashrc ~/.profile ~/.bash_profile")
        env = dict(line.split("=", 1) for line in (await verify(sandbox, task)).output_tail.splitlines() if "=" in line)
    assert env["OF_THE_IMAGE"] == "yes"
    assert env["TOKEN"] == "[redacted TERMRL_TEST_TOKEN]" and env["LENGTH"] == str(len("from-the-host"))
    assert env["LITERAL"] == "a ${B} c"
    assert env["PATH"] == "/usr/bin:/bin:/app/bin"
    assert "PLANTED" not in env and "must-not-leak" not in env.values()


async def test_a_host_variable_that_is_missing_is_an_error_before_anything_runs(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = tiny_task(tmp_path, verifier_env={"TOKEN": "${TERMRL_TEST_NOT_SET}"})
    async with sandbox_of(provider, task) as sandbox:
        with pytest.raises(TaskError, match="TERMRL_TEST_NOT_SET"):
            await verify(sandbox, task)


@pytest.mark.parametrize(
    ("path", "trusted"),
    [
        ("/usr/local/bin:/usr/bin:/bin", "/usr/local/bin:/usr/bin:/bin"),
        ("/root/.cargo/bin:/opt/conda/bin:/usr/bin", "/opt/conda/bin:/usr/bin:/root/.cargo/bin"),
        ("/app/bin:/app:/apple/bin:/bin", "/apple/bin:/bin:/app/bin:/app"),
        (":.:bin:/bin:", "/bin"),
        ("/tmp:/home/me/bin:/bin", "/bin:/tmp:/home/me/bin"),
    ],
)
def test_folders_that_the_policy_writes_to_come_last_on_the_path(path: str, trusted: str) -> None:
    assert trusted_path(path, "/app") == trusted


def test_a_workdir_that_is_the_root_makes_no_folder_untrusted() -> None:
    assert trusted_path("/usr/bin:/bin", "/") == "/usr/bin:/bin"


async def test_the_tests_are_absent_before_and_after_the_verify_window(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = tiny_task(tmp_path)
    look = (
        f"ls -A /tests /logs/verifier 2>/dev/null | grep -v ':$'; grep -rl {SECRET} /app /tmp /root /tests /logs /run"
    )
    async with sandbox_of(provider, task) as sandbox:
        assert "expected" not in await run(sandbox, look)
        await verify(sandbox, task)
        assert "expected" not in await run(sandbox, look)
        assert "test.sh" not in await run(sandbox, "ls -A /tests 2>/dev/null")


async def test_a_timeout_is_no_verdict_even_if_a_reward_was_written(provider: SandboxProvider, tmp_path: Path) -> None:
    test = "echo working; echo 1 > /logs/verifier/reward.txt; setsid sleep 987 & sleep 987"
    task = tiny_task(tmp_path, test=test, verifier_timeout_s=60.0)
    async with sandbox_of(provider, task) as sandbox:
        started = time.monotonic()
        verdict = await verify(sandbox, task, timeout_s=1.0)
        assert time.monotonic() - started < 5
        assert (verdict.outcome, verdict.cause) == (Outcome.NO_VERDICT, Cause.VERIFIER_TIMEOUT)
        assert "working" in verdict.output_tail
        assert "sleep 987" not in await run(sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")


async def test_the_tail_of_a_flood_of_test_output_is_kept(provider: SandboxProvider, tmp_path: Path) -> None:
    test = "seq 1 400000; echo the end; echo 1 > /logs/verifier/reward.txt"
    verdict = await verdict_of(provider, tmp_path, test)
    assert verdict.reward == 1.0
    assert verdict.output_tail.endswith("the end\n") and len(verdict.output_tail) <= 8192


async def test_tests_that_leave_a_process_behind_give_their_verdict_and_the_process_goes(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = tiny_task(tmp_path, test="sleep 986 & echo 1 > /logs/verifier/reward.txt")
    async with sandbox_of(provider, task) as sandbox:
        started = time.monotonic()
        assert (await verify(sandbox, task)).reward == 1.0
        assert time.monotonic() - started < 5
        assert "986" not in await run(sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")


async def test_a_reward_that_is_fetched_after_the_budget_is_no_verdict(
    provider: SandboxProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tiny_task(tmp_path, test="echo 1 > /logs/verifier/reward.txt")
    async with sandbox_of(provider, task) as sandbox:
        fetch = sandbox.get_bytes

        async def slow_fetch(source: str, *, max_bytes: int) -> bytes:
            data = await fetch(source, max_bytes=max_bytes)
            await asyncio.sleep(0.35)
            return data

        monkeypatch.setattr(sandbox, "get_bytes", slow_fetch)
        assert (await verify(sandbox, task, timeout_s=0.3)).cause is Cause.VERIFIER_TIMEOUT
        assert (await verify(sandbox, task, timeout_s=5.0)).reward == 1.0


async def test_two_reward_files_that_disagree_are_a_signal(provider: SandboxProvider, tmp_path: Path) -> None:
    json = """echo '{"reward": 1}' > /logs/verifier/reward.json; """
    for name, txt, signals in (("same", "1", {}), ("other", "0", {"rewards_disagree": [1.0, 0.0]})):
        task = tiny_task(tmp_path, id=name, test=f"{json} echo {txt} > /logs/verifier/reward.txt")
        async with sandbox_of(provider, task) as sandbox:
            verdict = await verify(sandbox, task)
            assert (verdict.raw_reward, verdict.signals) == (1.0, signals)


async def test_a_download_that_failed_is_infrastructure(provider: SandboxProvider, tmp_path: Path) -> None:
    test = "curl -LsSf https://astral.sh/uv/install.sh | sh || echo 'curl: (6) Could not resolve host: astral.sh'"
    verdict = await verdict_of(provider, tmp_path, test)
    assert (verdict.reward, verdict.cause) == (None, Cause.BOOTSTRAP_FAILED)
    assert "resolve host" in verdict.detail


async def test_a_failed_download_beside_a_reward_is_still_the_tests_word(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    test = "echo 'curl: (6) Could not resolve host: x'; echo 0 > /logs/verifier/reward.txt"
    assert (await verdict_of(provider, tmp_path, test)).cause is Cause.TESTS_FAILED


async def test_a_policy_cannot_pass_its_own_text_off_as_a_failed_download(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = tiny_task(tmp_path, test="cat answer.txt; exit 1")
    async with sandbox_of(provider, task) as sandbox:
        await run(sandbox, "echo 'curl: (6) Could not resolve host: x' > answer.txt")
        verdict = await verify(sandbox, task)
    assert "resolve host" in verdict.output_tail
    assert verdict.cause is Cause.VERIFIER_CRASH


async def test_a_sandbox_that_is_gone_gives_no_verdict(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path)
    async with sandbox_of(provider, task) as sandbox:
        await sandbox.stop()
        verdict = await verify(sandbox, task)
    assert (verdict.outcome, verdict.cause) == (Outcome.NO_VERDICT, Cause.SANDBOX_LOST)
