"""What a command can see, reach and become."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path

from termrl.errors import TaskError
from termrl.sandboxes.conformance.check import (
    EXEC_S,
    NotHere,
    Section,
    Subject,
    Unmet,
    ask,
    need,
    python_in,
    refused,
    same,
)

section = Section("isolation")

# What root of a container may have without reaching beyond it → its number in <linux/capability.h>.
_HARMLESS = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "SYS_CHROOT": 18,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}


@section.check("a command has no capability but those that the backend names, and cannot make a namespace or mount")
async def no_capabilities(subject: Subject) -> None:
    named = subject.provider.privileges.capabilities
    need(named <= set(_HARMLESS), f"capabilities that reach beyond a sandbox: {sorted(named - set(_HARMLESS))}")
    async with subject.sandbox() as sandbox:
        for line in (await ask(sandbox, "grep ^Cap /proc/self/status")).splitlines():
            name, _, mask = line.partition(":")
            more = int(mask, 16) & ~sum(1 << _HARMLESS[capability] for capability in named)
            need(not more, f"{name} holds {more:#x} as well")
        if not subject.provider.privileges.user_namespaces:
            await refused(sandbox, "unshare -U true")
        await refused(sandbox, "unshare -m true", "mount -t tmpfs none /mnt")
        if "SYS_CHROOT" not in named:
            await refused(sandbox, "chroot / true")


@section.check("the host's root is nobody here, and no process of a sandbox runs as it")
async def not_the_hosts_root(subject: Subject) -> None:
    if subject.provider.privileges.kernel_root:
        raise NotHere("this backend says that it maps no users on this machine")
    seconds = f"{300 + secrets.randbelow(10**6) / 10**6:.6f}"
    async with subject.sandbox() as sandbox:
        await ask(sandbox, f"sleep {seconds} >/dev/null 2>&1 &")
        line = f"sleep\0{seconds}\0".encode()
        owners: list[int] = []
        for _ in range(100):  # the child is there at once, but as the shell until it becomes `sleep`
            owners = [
                path.parent.stat().st_uid for path in Path("/proc").glob("[0-9]*/cmdline") if _reads(path) == line
            ]
            if owners:
                break
            await asyncio.sleep(0.02)
        need(owners and 0 not in owners, f"users of this machine that its process runs as: {owners}")


@section.check("setuid programs give nothing")
async def no_setuid(subject: Subject) -> None:
    if subject.provider.privileges.setuid:
        raise NotHere("this backend says that the image's setuid programs work")
    async with subject.sandbox() as sandbox:
        same(await ask(sandbox, "grep NoNewPrivs /proc/self/status | cut -f2"), "1\n", "NoNewPrivs")


@section.check("every signal to the first process is ignored")
async def signals_to_the_first(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        await sandbox.exec("for s in $(seq 1 64); do kill -$s 1; done; true", timeout_s=EXEC_S)
        same(await ask(sandbox, "echo alive"), "alive\n", "the next command after each signal to process 1")
        # One at a time as well: signals sent together can hide each other.
        for number in (1, 2, 3, 6, 9, 10, 12, 13, 14, 15, 17, 19, 20, 34, 64):
            await sandbox.exec(f"kill -{number} 1; kill -{number} -1", timeout_s=EXEC_S)
        same(await ask(sandbox, "echo alive"), "alive\n", "the next command after signals to everyone")


@section.check("the first process cannot be looked into")
async def first_process_closed(subject: Subject) -> None:
    async with subject.sandbox() as sandbox:
        for name in ("environ", "mem", "maps", "exe", "auxv", "cwd/", "root/", "fd/0"):
            result = await sandbox.exec(f"{'ls' if name.endswith('/') else 'cat'} /proc/1/{name}", timeout_s=EXEC_S)
            need(result.exit_code != 0, f"/proc/1/{name} can be read: {result.output[:80]!r}")
        await refused(sandbox, "readlink /proc/1/exe", "readlink /proc/1/fd/*", "echo x > /proc/1/fd/3")
        if not subject.provider.privileges.first_process_at_risk:
            await refused(sandbox, "echo 1000 > /proc/1/oom_score_adj")
        await refused(sandbox, "echo x > /proc/1/comm")


@section.check("the first process cannot be traced")
async def first_process_untraceable(subject: Subject) -> None:
    attach = "import ctypes,sys; sys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0)"
    async with subject.sandbox() as sandbox:
        await refused(sandbox, f"{await python_in(sandbox)} -c '{attach}'")


@section.check("a command cannot change what bounds the first process")
async def first_process_bounds(subject: Subject) -> None:
    change = (
        "import resource, sys\n"
        "for name in range(16):\n"
        "  own = resource.getrlimit(name)\n"
        "  for limits in ((0, 0), (0, own[1]), own):\n"
        "    try: resource.prlimit(1, name, limits)\n"
        "    except PermissionError: continue\n"
        "    sys.exit(f'limit {name} of process 1 is set to {limits}')\n"
    )
    async with subject.sandbox() as sandbox:
        result = await sandbox.exec(f"{await python_in(sandbox)} - <<'EOF'\n{change}EOF", timeout_s=EXEC_S)
        same((result.output, result.exit_code), ("", 0), "output and exit code")
        same(await ask(sandbox, "ulimit -n 64; ulimit -n; true & wait $!; echo alive"), "64\nalive\n", "its own limits")


@section.check("kernel settings cannot be written")
async def kernel_settings(subject: Subject) -> None:
    names = ("kernel/core_pattern", "kernel/modprobe", "vm/drop_caches", "user/max_user_namespaces")
    async with subject.sandbox() as sandbox:
        await refused(sandbox, *(f"cat /proc/sys/{name} > /proc/sys/{name}" for name in names))
        # a new file in cgroup v1's tmpfs is none of the kernel's
        groups = "for file in /sys/fs/cgroup/cgroup.procs /sys/fs/cgroup/*/{cgroup.procs,memory.limit_in_bytes}"
        write = "[ -e $file ] && echo 1 > $file && exit 0; done; false"
        await refused(sandbox, "echo b > /proc/sysrq-trigger", f"{groups}; do {write}")


@section.check("without a network there is loopback only, and it works")
async def loopback_only(subject: Subject) -> None:
    async with subject.sandbox(network_mode="no-network") as sandbox:
        same(await ask(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | xargs"), "lo\n", "network devices")
        await refused(sandbox, "exec 3<>/dev/tcp/1.1.1.1/53")
        if "refused" not in await ask(sandbox, "(exec 3<>/dev/tcp/127.0.0.1/9) 2>&1"):
            raise Unmet("loopback is not up: a connection to a closed port is not refused")


@section.check("a network mode that cannot be honoured is refused by name, never ignored")
async def network_refused(subject: Subject) -> None:
    for mode in ("public", "allowlist"):
        spec = replace(subject.spec, network_mode=mode)
        why = subject.provider.refusal(spec)
        if why is None:
            continue
        need(mode in why, f"the refusal does not name {mode}: {why}")
        try:
            sandbox = await subject.provider.create(spec)
        except TaskError as error:
            need(mode in error.message, f"the error does not name {mode}: {error.message}")
            continue
        await sandbox.stop()
        raise Unmet(f"{mode} is refused in words, but a sandbox is made")


@section.check("nothing of the host's environment is in any process")
async def host_environment(subject: Subject) -> None:
    name, value = "TERMRL_CONFORMANCE_CANARY", secrets.token_hex(16)
    os.environ[name] = value
    try:
        async with subject.sandbox() as sandbox:
            found = await ask(sandbox, "env; cat /proc/[0-9]*/{environ,cmdline} 2>/dev/null | tr '\\0' '\\n'")
    finally:
        del os.environ[name]
    need("PATH=" in found, "no environment could be read at all")
    need(name not in found and value not in found, "a variable of this process is seen in the sandbox")


@section.check("the host's private files, homes and accounts are not there")
async def host_files(subject: Subject) -> None:
    with tempfile.TemporaryDirectory(prefix="termrl-conformance-") as folder:
        secret = Path(folder, "secret")
        secret.write_text("hush")
        secret.chmod(0o644)
        Path(folder).chmod(0o755)
        async with subject.sandbox() as sandbox:
            await refused(sandbox, f"cat {secret}")
            if subject.spec.host_userland:
                await refused(sandbox, "cat /etc/shadow", "ls /etc/ssh/ssh_host*", "cat /etc/machine-id")
                found = await ask(sandbox, "ls -A /home /root /tmp /run /mnt 2>/dev/null | grep -v : | xargs")
                same(found, "\n", "files in /home, /root, /tmp, /run and /mnt")
            await refused(sandbox, "ls /var/run/docker.sock /run/docker.sock /run/podman /run/user")


@section.check("two sandboxes see nothing of each other")
async def from_each_other(subject: Subject) -> None:
    async with subject.sandbox() as one, subject.sandbox() as two:
        await ask(one, "echo 1 > /tmp/mark; echo 1 > /dev/shm/mark; sleep 300 >/dev/null 2>&1 &")
        found = await ask(two, "ls /tmp /dev/shm | grep mark; cat /proc/[0-9]*/comm | grep -c sleep")
        same(found, "0\n", "marks in its folders, then the number of sleeps that run")


@section.check("the usual folders can be written")
async def usual_folders(subject: Subject) -> None:
    folders = "/app /tmp /root /home /run /var/tmp /var/lib /opt /etc /dev/shm /srv /new"
    async with subject.sandbox() as sandbox:
        found = await sandbox.exec(
            f"for d in {folders}; do mkdir -p $d && echo x > $d/x || exit 1; done", timeout_s=EXEC_S
        )
        same((found.output, found.exit_code), ("", 0), "output and exit code")


def _reads(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
