"""Every resource that a command can use is bounded, and the sandbox works on after the bound was met."""

from __future__ import annotations

import time

from termrl.sandboxes.base import Sandbox


async def works(sandbox: Sandbox) -> bool:
    result = await sandbox.exec("echo a | tr a b", timeout_s=10)
    return result.output == "b\n"


async def test_a_fork_bomb_is_bounded_and_the_next_command_works(sandbox: Sandbox) -> None:
    result = await sandbox.exec("f() { f | f & f; }; f", timeout_s=1)
    assert result.timed_out or result.exit_code is not None
    assert await works(sandbox)
    assert int((await sandbox.exec("pgrep -c .", timeout_s=10)).output) <= 4


async def test_a_fork_bomb_left_in_the_background_does_not_block_the_next_command(sandbox: Sandbox) -> None:
    await sandbox.exec(
        "bomb() { bomb | bomb & }; bomb; for i in $(seq 500); do sleep 300 & done 2>/dev/null", timeout_s=1.5
    )
    assert await works(sandbox)


async def test_many_idle_processes_cannot_pass_the_limit(sandbox: Sandbox) -> None:
    result = await sandbox.exec("for i in $(seq 200); do sleep 30 & done 2>&1; jobs -p | wc -l", timeout_s=1.5)
    assert "Resource temporarily unavailable" in result.output or result.timed_out


async def test_running_out_of_memory_is_told_from_a_kill(sandbox: Sandbox) -> None:
    plain = await sandbox.exec("bash -c 'kill -9 $$'", timeout_s=10)
    assert (plain.exit_code, plain.oom) == (137, False)
    hog = "set -o pipefail; head -c 900m /dev/zero | tail -n 1 >/dev/null"
    result = await sandbox.exec(hog, timeout_s=20)
    assert result.exit_code not in (0, None)
    assert result.oom or "memory" in result.output
    assert await works(sandbox)


async def test_many_small_hogs_together_are_bounded(sandbox: Sandbox) -> None:
    hogs = "for i in 1 2 3 4 5 6; do head -c 100m /dev/zero | tail -n 1 | tail -c 0 & done; wait; sleep 0.3; echo over"
    result = await sandbox.exec(hogs, timeout_s=20)
    assert result.oom or "memory" in result.output
    assert await works(sandbox)


async def test_disk_fill_ends_in_no_space_and_the_reward_can_still_be_written(sandbox: Sandbox) -> None:
    result = await sandbox.exec("head -c 500m /dev/zero > /tmp/fill; du -sm /tmp | cut -f1", timeout_s=20)
    assert "No space left" in result.output
    assert int(result.output.split()[-1]) <= 64
    assert (await sandbox.exec("echo 1 > /logs/reward.txt && cat /logs/reward.txt", timeout_s=10)).output == "1\n"
    assert (await sandbox.exec("head -c 500m /dev/zero > /dev/shm/fill", timeout_s=10)).exit_code != 0
    assert (await sandbox.exec("head -c 100m /dev/zero > /dev/fill", timeout_s=10)).exit_code != 0
    assert await works(sandbox)


async def test_a_flood_of_files_is_cut(sandbox: Sandbox) -> None:
    begin = time.monotonic()
    flood = "mkdir /tmp/m; cd /tmp/m; i=0; while :; do : > $((i++)); done"
    result = await sandbox.exec(flood, timeout_s=30)
    assert not result.timed_out and result.exit_code == 137
    assert time.monotonic() - begin < 20
    count = int((await sandbox.exec("rm -r /tmp/m/1; ls -U /tmp/m | wc -l", timeout_s=10)).output)
    assert count < 64 * 256 + 100_000
    assert await works(sandbox)


async def test_open_files_and_core_dumps_are_bounded(sandbox: Sandbox) -> None:
    result = await sandbox.exec("ulimit -Hn; ulimit -Hc; ulimit -Hu", timeout_s=10)
    files, core, processes = result.output.split()
    assert int(files) <= 65536 and core == "0" and int(processes) == 64
