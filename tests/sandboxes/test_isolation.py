"""What the agent's commands can see, reach and replace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from termrl.errors import TaskError
from termrl.sandboxes.base import Sandbox, SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider


async def ask(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.exec(command, timeout_s=20)).output


async def test_it_is_root_without_any_capability_and_cannot_make_user_namespaces(sandbox: Sandbox) -> None:
    assert await ask(sandbox, "id -u") == "0\n"
    capabilities = await ask(sandbox, "grep -h ^Cap /proc/self/status | cut -f2 | sort -u")
    assert capabilities == "0000000000000000\n"
    assert (await sandbox.exec("unshare -U true", timeout_s=10)).exit_code != 0


async def test_the_hosts_uid_0_is_not_mapped(sandbox: Sandbox) -> None:
    inside, outside, count = (await ask(sandbox, "cat /proc/self/uid_map")).split()
    assert (inside, count) == ("0", "1")
    # Nested user namespaces: the outer one maps to a user of the host, who is never root.
    assert outside == "0"
    owner = await ask(sandbox, "stat -c %u /usr /proc/sys/kernel/core_pattern")
    assert owner == "65534\n65534\n"


async def test_kernel_settings_cannot_be_written(sandbox: Sandbox) -> None:
    for name in ("kernel/core_pattern", "vm/drop_caches", "user/max_user_namespaces"):
        assert (await sandbox.exec(f"echo x > /proc/sys/{name}", timeout_s=10)).exit_code != 0


async def test_only_loopback_exists(sandbox: Sandbox) -> None:
    assert await ask(sandbox, "ls /sys/class/net 2>/dev/null; tail -n +3 /proc/net/dev | cut -d: -f1 | xargs") == "lo\n"
    assert (await sandbox.exec("echo > /dev/tcp/1.1.1.1/53", timeout_s=10)).exit_code != 0


async def test_every_signal_to_the_first_process_is_ignored(sandbox: Sandbox) -> None:
    await sandbox.exec("for s in $(seq 1 64); do kill -$s 1; done; true", timeout_s=10)
    await sandbox.exec("kill -9 1; kill -KILL -1", timeout_s=10)
    assert await ask(sandbox, "echo alive") == "alive\n"


@pytest.mark.parametrize("command", ["cat environ", "cat mem", "cat maps", "cat exe", "cat auxv", "ls fd", "ls cwd/"])
async def test_the_first_process_cannot_be_looked_into(sandbox: Sandbox, command: str) -> None:
    result = await sandbox.exec(command, timeout_s=10, cwd="/proc/1")
    assert result.exit_code != 0
    assert "Permission denied" in result.output


async def test_the_first_process_cannot_be_traced(sandbox: Sandbox) -> None:
    attach = "import ctypes,sys; sys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0)"
    result = await sandbox.exec(f"command -v python3 || exit 1; python3 -c '{attach}'", timeout_s=10)
    assert result.exit_code == 1


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


async def test_the_usual_folders_can_be_written(sandbox: Sandbox) -> None:
    folders = "/app /tmp /root /home /run /var/tmp /var/lib /opt /etc /dev/shm /srv /new"
    result = await sandbox.exec(f"for d in {folders}; do mkdir -p $d && echo x > $d/x || exit 1; done", timeout_s=10)
    assert result.exit_code == 0, result.output


async def test_tests_is_empty_and_unchangeable_while_the_agent_acts(sandbox: Sandbox) -> None:
    assert await ask(sandbox, "ls -A /tests") == ""
    for attempt in ("echo x > /tests/test.sh", "mkdir /tests/x", "rmdir /tests", "mv /tests /t", "chmod 777 /tests"):
        assert (await sandbox.exec(attempt, timeout_s=10)).exit_code != 0, attempt


async def test_the_verify_window_shows_the_tests_and_a_fresh_log_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (tmp_path / "test.sh").chmod(0o600)
    (tmp_path / "data" / "expected").write_text("42")
    (tmp_path / "skip.me").write_text("")
    await ask(sandbox, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; ln -s / /logs/verifier/root")
    await sandbox.open_verify_window(tmp_path, exclude=frozenset({"skip.me"}))
    assert await ask(sandbox, "ls -A /logs/verifier; cd /tests; find . | sort | xargs; cat data/expected") == (
        ". ./data ./data/expected ./test.sh\n42"
    )
    for attempt in ("echo x >> /tests/test.sh", "rm /tests/test.sh", "touch /tests/conftest.py"):
        assert (await sandbox.exec(attempt, timeout_s=10)).exit_code != 0, attempt
    assert (await sandbox.exec("bash /tests/test.sh", timeout_s=10)).exit_code == 0
    assert await sandbox.get_bytes("/logs/verifier/reward.txt", max_bytes=4096) == b"1\n"
    await sandbox.close_verify_window()
    assert await ask(sandbox, "ls -A /tests") == ""


@pytest.mark.parametrize("plant", ["ln -s /tmp /logs/verifier", "echo x > /logs/verifier", "mkfifo /logs/verifier"])
async def test_a_planted_log_folder_is_replaced(sandbox: Sandbox, tmp_path: Path, plant: str) -> None:
    await ask(sandbox, f"rm -rf /logs/verifier; {plant}; echo 1 > /tmp/reward.txt")
    await sandbox.open_verify_window(tmp_path)
    assert await ask(sandbox, "stat -c %F /logs/verifier; ls -A /logs/verifier") == "directory\n"


async def test_two_sandboxes_see_nothing_of_each_other(provider: BubblewrapProvider) -> None:
    spec = SandboxSpec("t", host_userland=True)
    one, two = await provider.create(spec), await provider.create(spec)
    await ask(one, "echo 1 > /tmp/mark; sleep 300 >/dev/null 2>&1 &")
    assert await ask(two, "ls /tmp; pgrep -c sleep") == "0\n"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (SandboxSpec("heavy", image="python:3.12"), "heavy: needs image python:3.12"),
        (SandboxSpec("bare"), "bare: needs an image of its own"),
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


async def test_no_process_of_a_sandbox_runs_as_the_hosts_root(sandbox: Sandbox, provider: BubblewrapProvider) -> None:
    await sandbox.exec("sleep 309.5 >/dev/null 2>&1 &", timeout_s=10)
    expected = 65534 if os.geteuid() == 0 else os.geteuid()
    found = [p for p in Path("/proc").glob("[0-9]*/cmdline") if p.read_bytes() == b"sleep\x00309.5\x00"]
    assert [path.parent.stat().st_uid for path in found] == [expected]
