"""What the agent's commands can see, reach and replace."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.errors import TaskError
from termrl.sandboxes.base import Healthcheck, ImageBuild, Sandbox, SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider


async def ask(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.exec(command, timeout_s=20)).output


async def test_the_hosts_uid_0_is_not_mapped(sandbox: Sandbox) -> None:
    inside, outside, count = (await ask(sandbox, "cat /proc/self/uid_map")).split()
    assert (inside, count) == ("0", "1")
    # Nested user namespaces: the outer one maps to a user of the host, who is never root.
    assert outside == "0"
    owner = await ask(sandbox, "stat -c %u /usr /proc/sys/kernel/core_pattern")
    assert owner == "65534\n65534\n"


async def test_nothing_of_the_hosts_private_files_is_visible(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush")
    assert (await sandbox.exec(f"cat {tmp_path}/secret", timeout_s=10)).exit_code != 0
    assert await ask(sandbox, "ls -A /home /root /tmp /run /app /mnt | grep -v : | xargs") == "\n"
    assert (await sandbox.exec("ls /etc/shadow /etc/machine-id /etc/ssh /etc/sudoers", timeout_s=10)).exit_code == 2
    users = await ask(sandbox, "cut -d: -f1 /etc/passwd | xargs")
    assert users == "root nobody\n"


async def test_system_programs_cannot_be_replaced(sandbox: Sandbox) -> None:
    for attempt in (
        "echo evil > /usr/bin/bash",
        "rm /bin/bash",
        "mv /usr /usr2",
        "mv /bin /bin2",
        "rm -d /lib",
        "mv /etc /etc2",
        "mv /logs /logs2",
        "ln -sfn /tmp /tests",
        "mount -t tmpfs none /usr",
    ):
        result = await sandbox.exec(attempt, timeout_s=10)
        assert result.exit_code != 0, attempt
    assert await ask(sandbox, "echo $BASH_VERSION | cut -c1") in {"4\n", "5\n"}


async def test_no_library_can_be_preloaded_into_every_program(sandbox: Sandbox) -> None:
    for attempt in ("echo /tmp/evil.so > /etc/ld.so.preload", "rm -f /etc/ld.so.preload", "mv /tmp /etc/ld.so.preload"):
        assert (await sandbox.exec(attempt, timeout_s=10)).exit_code != 0, attempt
    assert (await sandbox.exec("echo > /etc/ld.so.cache", timeout_s=10)).exit_code != 0


async def test_tests_is_empty_and_unchangeable_while_the_agent_acts(sandbox: Sandbox) -> None:
    assert await ask(sandbox, "ls -A /tests") == ""
    for attempt in ("echo x > /tests/test.sh", "mkdir /tests/x", "rmdir /tests", "mv /tests /t", "chmod 777 /tests"):
        assert (await sandbox.exec(attempt, timeout_s=10)).exit_code != 0, attempt


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (SandboxSpec("heavy", image="python:3.12"), "heavy: needs image python:3.12"),
        (SandboxSpec("bare"), "bare: needs an image of its own"),
        (SandboxSpec("made", build=ImageBuild(Path("/x"))), "made: needs an image built from environment/Dockerfile"),
        (SandboxSpec("user", host_userland=True, user="bob"), "user: agent.user bob"),
        (SandboxSpec("tests", host_userland=True, verifier_user="7"), "tests: verifier.user 7"),
        (SandboxSpec("ready", host_userland=True, healthcheck=Healthcheck("true")), "ready: environment.healthcheck"),
        (SandboxSpec("web", host_userland=True, network_mode="public"), "web: network_mode public"),
        (SandboxSpec("list", host_userland=True, network_mode="allowlist"), "list: network_mode allowlist"),
    ],
)
async def test_a_task_that_cannot_be_honoured_is_refused_by_name(
    provider: BubblewrapProvider, spec: SandboxSpec, said: str
) -> None:
    assert provider.refusal(spec)
    with pytest.raises(TaskError, match=said):
        await provider.create(spec)
    assert provider.live == 0
