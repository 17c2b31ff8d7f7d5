"""What a container is made with: image, user, network, limits, health check; and what the daemon tells of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from termrl.errors import ImageError, SandboxStartError, TaskError
from termrl.sandboxes.base import Healthcheck, SandboxSpec
from termrl.sandboxes.docker.container import DockerSandbox
from termrl.sandboxes.docker.provider import DockerProvider

EXEC_S = 20.0


async def said(sandbox: DockerSandbox, command: str) -> str:
    return (await sandbox.exec(command, timeout_s=EXEC_S)).output.strip()


@pytest.mark.parametrize(
    ("user", "found"),
    [
        (None, "0 0 0 /root root"),
        ("nobody", "65534 65534 65534 /nonexistent nobody"),
        ("65534", "65534 65534 65534 /nonexistent nobody"),
        ("daemon:mail", "1 8 8 /usr/sbin daemon"),
        ("1234:4321", "1234 4321 4321 / 1234"),
    ],
)
async def test_commands_run_as_the_tasks_user(
    provider: DockerProvider, spec: SandboxSpec, user: str | None, found: str
) -> None:
    sandbox = await provider.create(replace(spec, user=user))
    assert await said(sandbox, "echo $(id -u) $(id -g) $(id -G) $HOME $USER") == found
    await sandbox.stop()


async def test_a_user_that_the_image_does_not_have_is_named(provider: DockerProvider, spec: SandboxSpec) -> None:
    with pytest.raises(SandboxStartError, match=r"a-task.*no user stranger"):
        await provider.create(replace(spec, user="stranger"))
    assert provider.live == 0


@contextmanager
def listening_on_the_bridge(gateway: str) -> Iterator[int]:
    """A port of the bridge's own address on which something says ``hello``."""
    with socket.create_server((gateway, 0)) as server:

        def serve() -> None:
            with server.accept()[0] as client:
                client.sendall(b"hello\n")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


async def test_public_reaches_the_bridge_and_no_network_reaches_nothing(
    provider: DockerProvider, spec: SandboxSpec
) -> None:
    if provider.refusal(replace(spec, network_mode="public")):
        pytest.skip("this daemon has no bridge network")
    public = await provider.create(replace(spec, network_mode="public"))
    gateway = provider.daemon.client.api.inspect_container(public.id)["NetworkSettings"]["Gateway"]
    with listening_on_the_bridge(gateway) as port:
        ask = f"timeout 5 bash -c 'cat < /dev/tcp/{gateway}/{port}'"
        closed = await provider.create(replace(spec, network_mode="no-network"))
        result = await closed.exec(ask, timeout_s=EXEC_S)
        assert result.exit_code != 0 and "unreachable" in result.output
        assert await said(closed, "ls /sys/class/net") == "lo"
        await closed.stop()
        assert await said(public, ask) == "hello"
        assert "eth0" in await said(public, "ls /sys/class/net")
        await public.stop()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"network_mode": "allowlist", "allowed_hosts": ("pypi.org",)}, "network_mode allowlist"),
        ({"gpus": 1}, "gpus = 1"),
        ({"image": None}, "neither docker_image nor environment/Dockerfile"),
    ],
)
async def test_what_it_cannot_honour_is_refused_by_name(
    provider: DockerProvider, spec: SandboxSpec, changes: dict[str, object], named: str
) -> None:
    wanted = replace(spec, **changes)  # pyright: ignore[reportArgumentType]
    assert named in (provider.refusal(wanted) or "")
    with pytest.raises(TaskError, match=f"a-task: .*{named}"):
        await provider.create(wanted)


async def test_an_image_that_is_not_there_is_an_image_error(provider: DockerProvider, spec: SandboxSpec) -> None:
    with pytest.raises(ImageError, match=r"a-task.*no-such/image"):
        await provider.create(replace(spec, image="no-such/image:1"))
    assert provider.live == 0


async def test_memory_cpus_and_processes_are_bounded_without_swap(provider: DockerProvider, spec: SandboxSpec) -> None:
    sandbox = await provider.create(replace(spec, memory_mb=96, cpus=0.5, pids=50))
    host = provider.daemon.client.api.inspect_container(sandbox.id)["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"], host["PidsLimit"]) == (
        *(96 << 20, 96 << 20, 500_000_000, 50),
    )
    assert (host["Privileged"], host["NetworkMode"], host["PidMode"], host["IpcMode"]) == (False, "none", "", "private")
    result = await sandbox.exec("head -c 300m /dev/zero | tail -n 1 | wc -c", timeout_s=EXEC_S)
    assert result.oom and result.output != f"{300 << 20}\n"
    await sandbox.stop()


async def test_root_can_install_a_package_and_give_files_away(
    provider: DockerProvider, spec: SandboxSpec, tmp_path: Path
) -> None:
    sandbox = await provider.create(spec)
    package = "mkdir -p p/DEBIAN p/usr/bin && printf 'Package: x\nVersion: 1\nArchitecture: all\nMaintainer: m\n\
Description: d\n' > p/DEBIAN/control && printf '#!/bin/sh\necho installed\n' > p/usr/bin/x && chmod 755 p/usr/bin/x"
    made = await sandbox.exec(f"{package} && dpkg-deb -b p x.deb && apt-get install -y ./x.deb && x", timeout_s=60)
    assert made.output.endswith("installed\n"), made.output
    assert await said(sandbox, "touch f; chown daemon:mail f; chmod 4755 f; stat -c '%U %G %a' f") == "daemon mail 4755"
    assert await said(sandbox, "su -s /bin/sh nobody -c 'id -un'") == "nobody"
    await sandbox.stop()


async def test_a_healthcheck_is_awaited(provider: DockerProvider, spec: SandboxSpec) -> None:
    check = Healthcheck("echo x >> /tries; [ $(wc -l < /tries) = 3 ]", interval_s=0.05, retries=5)
    sandbox = await provider.create(replace(spec, healthcheck=check))
    assert await said(sandbox, "wc -l < /tries") == "3"
    await sandbox.stop()


async def test_failures_within_the_start_period_are_not_counted(provider: DockerProvider, spec: SandboxSpec) -> None:
    check = Healthcheck(
        "echo x >> /tries; [ $(wc -l < /tries) = 4 ]", start_period_s=30, start_interval_s=0.05, retries=1
    )
    sandbox = await provider.create(replace(spec, healthcheck=check))
    assert await said(sandbox, "wc -l < /tries") == "4"
    await sandbox.stop()


async def test_a_failing_healthcheck_is_the_end_and_says_what_it_said(
    provider: DockerProvider, spec: SandboxSpec
) -> None:
    check = Healthcheck("echo not yet; exit 4", interval_s=0.02, retries=2)
    with pytest.raises(SandboxStartError, match=r"a-task: the health check failed 2 times \(exit status 4\): not yet"):
        await provider.create(replace(spec, healthcheck=check))
    assert provider.live == 0


async def test_the_daemon_tells_what_changed_whatever_the_agent_does(sandbox: DockerSandbox) -> None:
    before = await sandbox.changed_paths()
    plant = "cp /bin/ls /bin/bash; echo 1 > /etc/new; rm /etc/debian_version; touch -d 2001-01-01 /bin/bash /etc/new"
    await said(sandbox, plant)
    after = await sandbox.changed_paths()
    changed = {path: kind for path, kind in after.items() if before.get(path) != kind}
    assert changed["/usr/bin/bash"] == "changed"
    assert changed["/etc/new"] == "added"
    assert changed["/etc/debian_version"] == "deleted"
    assert not any(path.startswith(("/.termrl", "/tests")) for path in after)


async def test_a_replaced_shell_is_put_back_as_the_image_has_it(sandbox: DockerSandbox) -> None:
    digest = await said(sandbox, "sha256sum < /bin/bash; sha256sum < /bin/cat; stat -c '%a %U' /bin/bash")
    evil = "cp /bin/true /tmp/t && mv /tmp/t /bin/bash; rm /bin/cat; ln -s /tmp/x /bin/sha256sum.new; rm -f /bin/sh"
    await said(sandbox, evil)
    await sandbox.kill_all()
    assert await said(sandbox, "echo fooled") == ""
    changed = [path for path in await sandbox.changed_paths() if path.startswith("/usr/bin/")]
    restored = await sandbox.restore([*changed, "/no/such"])
    assert sorted(restored) == ["/usr/bin/bash", "/usr/bin/cat", "/usr/bin/sh"]
    assert await said(sandbox, "sha256sum < /bin/bash; sha256sum < /bin/cat; stat -c '%a %U' /bin/bash") == digest
    assert await said(sandbox, "readlink /bin/sh") == "dash"


async def test_hosts_and_resolver_can_be_put_back_though_they_are_mounts(sandbox: DockerSandbox) -> None:
    for path in ("/etc/hosts", "/etc/resolv.conf"):
        before = await sandbox.get_bytes(path, max_bytes=9999)
        await said(sandbox, f"echo '6.6.6.6 pypi.org' >> {path}")
        await sandbox.put_bytes(before, path)
        assert await sandbox.get_bytes(path, max_bytes=9999) == before


@pytest.mark.parametrize(
    "plant",
    [
        "rm -rf /logs; ln -s /tmp /logs; mkdir -p /tmp/verifier; echo 1 > /tmp/verifier/reward.txt",
        "rm -rf /logs; echo x > /logs",
        "mkdir -p /logs/verifier; cd /logs/verifier; "
        'python3 -c \'import os\nfor _ in range(3000): os.mkdir("d"); os.chdir("d")\'',
    ],
    ids=["link", "file", "deep"],
)
async def test_logs_are_fresh_whatever_was_planted(sandbox: DockerSandbox, tmp_path: Path, plant: str) -> None:
    await said(sandbox, plant)
    await sandbox.kill_all()
    await sandbox.open_verify_window(tmp_path)
    found = await said(sandbox, "stat -c '%F %U' /logs /logs/verifier; ls -A /logs/verifier")
    assert found == "directory root\ndirectory root"


async def test_what_the_image_says_of_the_loader_is_for_commands_only(
    provider: DockerProvider, spec: SandboxSpec
) -> None:
    sandbox = await provider.create(replace(spec, env={"LD_PRELOAD": "/no/such.so", "LD_LIBRARY_PATH": "/nowhere"}))
    assert "/no/such.so" in await said(sandbox, "/bin/true; echo $LD_PRELOAD")
    assert await sandbox.kill_all() == 0
    await sandbox.stop()
