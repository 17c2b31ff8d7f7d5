"""Who runs the commands of a container, and what becomes of that when an agent attacks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from termrl.errors import SandboxLostError
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.docker import reaper
from termrl.sandboxes.docker.container import DockerSandbox
from termrl.sandboxes.docker.provider import DockerProvider

EXEC_S = 20.0


async def said(sandbox: DockerSandbox, command: str) -> str:
    return (await sandbox.exec(command, timeout_s=EXEC_S)).output.strip()


async def test_an_agent_that_kills_everything_loses_neither_the_sandbox_nor_the_next_command(
    sandbox: DockerSandbox,
) -> None:
    await said(sandbox, "setsid sleep 300 & echo kept > /kept")
    await said(sandbox, "for s in $(seq 1 64); do kill -$s 1; done; kill -9 -1")
    assert await said(sandbox, "cat /kept; pgrep -c sleep") == "kept\n0"


@pytest.mark.parametrize("limit", ["cpu=0:0", "nofile=0:0", "as=1:1", "nproc=0:0"])
async def test_the_limits_of_the_first_process_cannot_be_changed(sandbox: DockerSandbox, limit: str) -> None:
    result = await sandbox.exec(f"prlimit --pid 1 --{limit}", timeout_s=EXEC_S)
    assert result.exit_code != 0 and "not permitted" in result.output
    assert await said(sandbox, "echo alive") == "alive"


async def test_the_agents_socket_is_gone_before_its_first_command_and_its_folder_cannot_be_written(
    sandbox: DockerSandbox,
) -> None:
    assert await said(sandbox, "ls -A /.termrl-run") == ""
    assert "Read-only" in await said(sandbox, "touch /.termrl-run/x /.termrl/x 2>&1")


async def test_what_the_verifier_runs_is_planted_nowhere_that_an_agent_can_write(sandbox: DockerSandbox) -> None:
    plants = (
        "echo /tmp/evil.so > /etc/ld.so.preload",
        "mv /.termrl /gone",
        "rm -rf /.termrl/so",
        "umount /.termrl",
        "mount --bind /tmp /.termrl",
        "mv /tests /elsewhere",
    )
    for plant in plants:
        assert (await sandbox.exec(plant, timeout_s=EXEC_S)).exit_code != 0, plant


async def test_if_the_first_process_does_not_answer_any_more_the_daemon_runs_the_commands(
    provider: DockerProvider, spec: SandboxSpec
) -> None:
    sandbox = await provider.create(replace(spec, user="nobody", env={"A": "b"}))
    assert await said(sandbox, "echo $PPID $A; id -un") == "1 b\nnobody"
    sandbox._agent.lose("a fault of the test")
    result = await sandbox.exec("echo $PPID $A; id -un; sleep 300 & exit 3", timeout_s=EXEC_S)
    parent, value, user = result.output.split()
    assert (parent != "1", value, user, result.exit_code, result.background) == (True, "b", "nobody", 3, 1)
    cut = await sandbox.exec("echo on; setsid sleep 301 & sleep 302", timeout_s=0.5)
    assert (cut.output, cut.timed_out, cut.background) == ("on\n", True, 1)
    await sandbox.stop()


async def test_a_timeout_kills_the_processes_of_every_user(sandbox: DockerSandbox) -> None:
    command = "su -s /bin/bash daemon -c 'setsid sleep 303 & sleep 304' & sleep 305"
    cut = await sandbox.exec(command, timeout_s=0.7)
    assert (cut.timed_out, cut.background) == (True, 0)
    assert await said(sandbox, "pgrep -c sleep") == "0"


async def test_after_kill_all_commands_come_from_the_daemon_as_root_and_nobody_else_is_there(
    provider: DockerProvider, spec: SandboxSpec
) -> None:
    sandbox = await provider.create(replace(spec, user="nobody"))
    await said(sandbox, "setsid sleep 300 & setsid sleep 301 & true")
    assert await sandbox.kill_all() == 2
    parent, user, sleeping = (await said(sandbox, "echo $PPID; id -un; pgrep -c sleep")).split()
    assert (parent != "1", user, sleeping) == (True, "root", "0")
    await sandbox.stop()


async def test_tests_that_kill_everything_do_not_end_the_verification(sandbox: DockerSandbox, tmp_path: Path) -> None:
    (tmp_path / "test.sh").write_text("sleep 300 &\necho 1 > /logs/verifier/reward.txt\nkill -9 $PPID\nsleep 300\n")
    await sandbox.kill_all()
    await sandbox.open_verify_window(tmp_path)
    result = await sandbox.exec("exec bash /tests/test.sh", timeout_s=EXEC_S, clean_env=True)
    assert (result.exit_code, result.output) == (137, "")
    assert await sandbox.get_bytes("/logs/verifier/reward.txt", max_bytes=99) == b"1\n"
    assert await said(sandbox, "pgrep -c sleep") == "0"


async def test_a_container_that_ends_is_lost_with_the_reason(provider: DockerProvider, spec: SandboxSpec) -> None:
    sandbox = await provider.create(spec)
    reaper.remove(provider.daemon.client, sandbox.id)
    with pytest.raises(SandboxLostError, match=sandbox.id):
        await sandbox.exec("true", timeout_s=EXEC_S)
    await sandbox.stop()


async def test_a_container_ends_by_itself_when_its_time_is_over(
    state: Path, spec: SandboxSpec, docker_required: None
) -> None:
    async with DockerProvider(state=state, ttl_s=2) as provider:
        sandbox = await provider.create(spec)
        with pytest.raises(SandboxLostError, match="its container ended with status 0"):
            await sandbox.exec("sleep 30", timeout_s=EXEC_S)
