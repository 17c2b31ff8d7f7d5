"""Exec semantics, each on a real sandbox, with cgroups and without."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from termrl.errors import CommandError, SandboxLostError
from termrl.sandboxes.base import Sandbox, SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider


async def test_exit_code_output_and_duration_are_reported(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 3", timeout_s=10)
    assert (result.output, result.exit_code, result.timed_out) == ("out\nerr\n", 3, False)
    assert 0 < result.duration_s < 5


async def test_a_shell_killed_by_a_signal_gives_128_plus_the_signal(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("kill -TERM $$", timeout_s=10)).exit_code == 143


async def test_each_command_starts_afresh_but_files_and_background_processes_stay(sandbox: Sandbox) -> None:
    await sandbox.exec("cd /tmp; x=1; f() { :; }; echo kept > file; sleep 300 >/dev/null 2>&1 &", timeout_s=10)
    result = await sandbox.exec("pwd; echo [$x]; type -t f; cat /tmp/file; pgrep -c sleep", timeout_s=10)
    assert result.output == "/app\n[]\nkept\n1\n"


async def test_the_environment_is_non_interactive_and_holds_nothing_of_the_host(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    names = dict(
        line.split("=", 1) for line in (await sandbox.exec("env", timeout_s=10)).output.splitlines() if "=" in line
    )
    assert names["PAGER"] == names["GIT_PAGER"] == "cat"
    assert names["TERM"] == "dumb"
    assert names["HOME"] == "/root"
    assert names["PATH"].split(":")[0] == "/usr/local/sbin"
    assert set(names) <= {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PAGER", "GIT_PAGER", "DEBIAN_FRONTEND"),
        *("PWD", "SHLVL", "_"),
    }


async def test_env_adds_to_the_specs_and_clean_env_leaves_the_specs_out(provider: BubblewrapProvider) -> None:
    sandbox = await provider.create(SandboxSpec("t", host_userland=True, env={"A": "task", "B": "task"}))
    show = 'echo "$A $B $C"'
    assert (await sandbox.exec(show, timeout_s=10, env={"B": "call"})).output == "task call \n"
    assert (await sandbox.exec(show, timeout_s=10, env={"C": "call"}, clean_env=True)).output == "  call\n"


async def test_stdin_is_empty(sandbox: Sandbox) -> None:
    result = await sandbox.exec("cat; readlink /proc/self/fd/0", timeout_s=10)
    assert result.output == "/dev/null\n"


async def test_no_descriptor_of_ours_reaches_a_command(sandbox: Sandbox) -> None:
    result = await sandbox.exec("exec ls -l /proc/self/fd", timeout_s=10)
    assert "socket" not in result.output and "memfd" not in result.output


async def test_a_timeout_kills_the_tree_with_its_daemons_and_returns_what_came(sandbox: Sandbox) -> None:
    command = "echo before; (setsid env -i setsid sleep 301 &) ; setsid bash -c 'sleep 302 & disown; wait' & sleep 303"
    begin = time.monotonic()
    result = await sandbox.exec(command, timeout_s=0.7)
    assert (result.output, result.exit_code, result.timed_out) == ("before\n", None, True)
    assert time.monotonic() - begin < 3
    assert (await sandbox.exec("pgrep -c sleep", timeout_s=10)).output == "0\n"


async def test_a_timeout_spares_the_daemons_of_earlier_commands(sandbox: Sandbox) -> None:
    await sandbox.exec("setsid sleep 304 >/dev/null 2>&1 &", timeout_s=10)
    assert (await sandbox.exec("sleep 305 & sleep 306", timeout_s=0.3)).timed_out
    assert (await sandbox.exec("pgrep -af sleep", timeout_s=10)).output.split()[1:] == ["sleep", "304"]


async def test_a_timeout_ends_a_program_that_ignores_signals_and_spins(sandbox: Sandbox) -> None:
    result = await sandbox.exec("trap '' TERM INT HUP; echo on; while :; do :; done", timeout_s=0.3)
    assert result.timed_out and result.output == "on\n"


async def test_a_background_child_that_holds_stdout_does_not_hold_the_call(sandbox: Sandbox) -> None:
    begin = time.monotonic()
    result = await sandbox.exec("sleep 1000 & echo started", timeout_s=10)
    assert time.monotonic() - begin < 3
    assert (result.output, result.exit_code, result.background) == ("started\n", 0, 1)
    assert (await sandbox.exec("sleep 1000 & true", timeout_s=10)).background == 2


async def test_what_a_background_child_says_within_the_drain_is_kept(sandbox: Sandbox) -> None:
    result = await sandbox.exec("(sleep 0.02; echo late) & true", timeout_s=10)
    assert result.output == "late\n"


async def test_a_service_that_goes_on_writing_to_its_output_lives_on(sandbox: Sandbox) -> None:
    result = await sandbox.exec("(while sleep 0.05; do echo beat; date +%N > /tmp/beat; done) &", timeout_s=10)
    assert result.background >= 1
    first = (await sandbox.exec("sleep 0.5; cat /tmp/beat", timeout_s=10)).output
    second = (await sandbox.exec("sleep 0.5; cat /tmp/beat", timeout_s=10)).output
    assert first and second and first != second


async def test_a_flood_from_the_background_is_slowed_and_does_not_disturb(sandbox: Sandbox) -> None:
    await sandbox.exec("yes &", timeout_s=10)
    await asyncio.sleep(0.3)
    ticks = "cut -d' ' -f14,15 /proc/$(pgrep -x yes)/stat"
    before = (await sandbox.exec(ticks, timeout_s=10)).output.split()
    await asyncio.sleep(1.0)
    after = (await sandbox.exec(ticks, timeout_s=10)).output.split()
    used = sum(map(int, after)) - sum(map(int, before))
    assert used < 50, f"{used} of 100 ticks: the flood runs at full speed"


async def test_300_mb_of_output_costs_bounded_memory_and_keeps_head_and_tail(sandbox: Sandbox) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    result = await sandbox.exec("echo first; head -c 300000000 /dev/zero | tr '\\0' y; echo; echo last", timeout_s=60)
    assert process.memory_info().rss - before < 20 << 20
    assert result.output.startswith("first\nyyy") and result.output.endswith("yyy\nlast\n")
    assert len(result.output) < 70_000
    kept = len(result.output) - len(f"\n[... {result.truncated_bytes} bytes of output left out ...]\n")
    assert kept + result.truncated_bytes == 300_000_000 + len("first\n\nlast\n")


async def test_a_larger_output_limit_is_honoured_past_one_packet(sandbox: Sandbox) -> None:
    result = await sandbox.exec("seq 200000", timeout_s=20, output_limit=4 << 20)
    assert result.output == "".join(f"{number}\n" for number in range(1, 200001))
    assert result.truncated_bytes == 0


async def test_random_bytes_are_replaced_not_raised(sandbox: Sandbox) -> None:
    result = await sandbox.exec("printf 'a\\377\\376b'; head -c 999 /dev/urandom", timeout_s=10)
    assert result.output.startswith("a\ufffd\ufffdb")


async def test_a_200_kb_command_runs_whole(sandbox: Sandbox) -> None:
    text = "x" * 200_000
    result = await sandbox.exec(f"cat <<'EOF' | wc -c\n{text}\nEOF\n", timeout_s=10)
    assert (result.output, result.exit_code) == ("200001\n", 0)
    assert (await sandbox.exec(f": {text}; exit 7", timeout_s=10)).exit_code == 7
    fds = await sandbox.exec(f": {text}\nexec ls /proc/self/fd", timeout_s=10)
    assert fds.output.split() == ["0", "1", "2", "3"]


async def test_a_nul_byte_is_a_clear_error(sandbox: Sandbox) -> None:
    with pytest.raises(CommandError, match="NUL byte"):
        await sandbox.exec("echo \0", timeout_s=10)
    with pytest.raises(CommandError, match="NUL byte"):
        await sandbox.exec("true", timeout_s=10, env={"A": "\0"})


@pytest.mark.parametrize("cwd", ["/no/such", "/etc/passwd"])
async def test_a_bad_working_directory_is_an_error_not_output(sandbox: Sandbox, cwd: str) -> None:
    with pytest.raises(CommandError, match="working directory"):
        await sandbox.exec("true", timeout_s=10, cwd=cwd)
    await sandbox.exec("rm -r /app", timeout_s=10, cwd="/")
    with pytest.raises(CommandError, match="working directory /app"):
        await sandbox.exec("true", timeout_s=10)


async def test_cwd_is_where_the_command_runs(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("pwd", timeout_s=10, cwd="/tmp")).output == "/tmp\n"


async def test_zombies_are_reaped(sandbox: Sandbox) -> None:
    await sandbox.exec("for i in $(seq 20); do (setsid true &) ; done; sleep 0.2", timeout_s=10)
    assert (await sandbox.exec("grep -l '^State:.Z' /proc/[0-9]*/status", timeout_s=10)).output == ""


async def test_16_execs_at_once_on_one_sandbox_keep_apart(sandbox: Sandbox) -> None:
    commands = [f"sleep 0.0{n % 10}; echo {n}; exit {n}" for n in range(16)]
    results = await asyncio.gather(*(sandbox.exec(command, timeout_s=20) for command in commands))
    assert [(result.output, result.exit_code) for result in results] == [(f"{n}\n", n) for n in range(16)]


async def test_one_timeout_among_concurrent_execs_cuts_only_its_own(sandbox: Sandbox) -> None:
    slow, quick = await asyncio.gather(
        sandbox.exec("sleep 30", timeout_s=0.3), sandbox.exec("sleep 1; echo done", timeout_s=10)
    )
    assert slow.timed_out and (quick.output, quick.exit_code) == ("done\n", 0)


async def test_a_cancelled_exec_is_killed_inside(sandbox: Sandbox) -> None:
    task = asyncio.create_task(sandbox.exec("sleep 307", timeout_s=100))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.2)
    assert (await sandbox.exec("pgrep -c sleep", timeout_s=10)).output == "0\n"


async def test_kill_all_counts_and_kills_everything_also_a_forking_daemon(sandbox: Sandbox) -> None:
    await sandbox.exec("for i in 1 2 3; do setsid sleep 308 & done", timeout_s=10)
    assert await sandbox.kill_all() == 3
    await sandbox.exec("(while :; do sleep 0.001 & done) >/dev/null 2>&1 &", timeout_s=10)
    assert await sandbox.kill_all() >= 1
    assert await sandbox.kill_all() == 0
    result = await sandbox.exec("pgrep -c .", timeout_s=10)
    assert int(result.output) <= 3


async def test_a_stopped_sandbox_says_that_it_is_gone(sandbox: Sandbox) -> None:
    waiting = asyncio.create_task(sandbox.exec("sleep 100", timeout_s=100))
    await asyncio.sleep(0.2)
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxLostError):
        await waiting
    with pytest.raises(SandboxLostError):
        await sandbox.exec("true", timeout_s=1)


async def test_a_sandbox_whose_first_process_is_killed_from_outside_is_lost(
    sandbox: Sandbox, provider: BubblewrapProvider
) -> None:
    waiting = asyncio.create_task(sandbox.exec("sleep 100", timeout_s=100))
    await asyncio.sleep(0.2)
    provider.kill(sandbox.id)
    with pytest.raises(SandboxLostError, match="sample"):
        await asyncio.wait_for(waiting, 5)
    await sandbox.stop()
    assert provider.live == 0
