"""How a container is asked for: limits, privileges, mounts and its first process."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termrl.sandboxes.base import SandboxSpec

if TYPE_CHECKING:
    import docker

DEFAULT_MEMORY_MB = 2048
DEFAULT_PIDS = 4096
MAX_FILES = 65_536

RUN = "/.termrl-run"
TESTS = "/tests"
PRELOAD = "/etc/ld.so.preload"

# What Docker gives to root in a container, less NET_RAW (it reaches others on the bridge) and MKNOD (it makes devices).
COMMAND_CAPABILITIES = frozenset(
    (
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE"),
        *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    )
)
# With it the first process makes every command one that is killed for memory before it; no command keeps it.
FIRST_CAPABILITY = "SYS_RESOURCE"
# What a container gets that cannot have its daemon's own.
_RLIMITS = (("nofile", resource.RLIMIT_NOFILE, MAX_FILES), ("nproc", resource.RLIMIT_NPROC, 32_768))
_SHM_MB = 64
_CLOSED = (
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
    "/proc/1/oom_score_adj",
    "/sys/fs/cgroup",
)
_LOADER = ("LD_", "GLIBC_TUNABLES")
_NETWORKS = {"no-network": "none", "public": "bridge"}


@dataclass(frozen=True)
class Extras:
    """What not every daemon can do.

    Attributes:
        cpus: how many its machine has; more cannot be asked for.
        quota: it can bound a container's files.
        first_capability: it may give :data:`FIRST_CAPABILITY` away.
        own_rlimits: it may give the limits that are its own default (podman's: a million open files and processes);
            else it is asked for less, and for no more than this process may have.
    """

    cpus: int
    quota: bool
    first_capability: bool = True
    own_rlimits: bool = True

    def without(self, said: str) -> Extras | None:
        """What is left when a container was refused with these words; ``None`` if they are about something else."""
        if self.first_capability and "apply caps" in said:
            return replace(self, first_capability=False)
        if self.own_rlimits and "rlimit" in said.lower():
            return replace(self, own_rlimits=False)
        if self.quota and "storage-opt" in said:
            return replace(self, quota=False)
        return None


@dataclass(frozen=True)
class Bound:
    """A host file or folder that the container sees, read-only."""

    source: Path
    target: str


def create(
    client: docker.DockerClient,
    name: str,
    image: str,
    spec: SandboxSpec,
    *,
    command: Sequence[str],
    bounds: Sequence[Bound],
    labels: Mapping[str, str],
    extras: Extras,
) -> str:
    """Make a container, not started, and return its id.

    Args:
        spec: with the image's own variables in its environment.
        command: the first process; the image's entry point is not run.
        extras: what the daemon can do.
    """
    from docker.types import Mount, Ulimit

    memory = (spec.memory_mb or DEFAULT_MEMORY_MB) << 20
    ulimits = [Ulimit(name="core", soft=0, hard=0)]
    if not extras.own_rlimits:
        for limit, number, most in _RLIMITS:
            bound = min(most, resource.getrlimit(number)[1])
            ulimits.append(Ulimit(name=limit, soft=bound, hard=bound))
    host_config: dict[str, Any] = client.api.create_host_config(
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=spec.pids or DEFAULT_PIDS,
        nano_cpus=int(min(spec.cpus, extras.cpus) * 1e9) if spec.cpus else None,
        network_mode=_NETWORKS[spec.network_mode],
        cap_drop=["ALL"],
        cap_add=sorted(COMMAND_CAPABILITIES | ({FIRST_CAPABILITY} if extras.first_capability else set())),
        ulimits=ulimits,
        shm_size=_SHM_MB << 20,
        init=False,
        mounts=[Mount(bound.target, str(bound.source), type="bind", read_only=True) for bound in bounds],
        storage_opt={"size": f"{spec.storage_mb}M"} if extras.quota and spec.storage_mb else None,
    )
    host_config["ReadonlyPaths"] = list(_CLOSED)
    made = client.api.create_container(
        image,
        name=name,
        entrypoint=list(command),
        command=[],
        user="0:0",
        working_dir="/",
        # Our own processes there must not load what the image's variables name; its commands get them all.
        environment={key: "" for key in spec.env if key.startswith(_LOADER)},
        labels=dict(labels),
        healthcheck={"Test": ["NONE"]},
        network_disabled=False,
        host_config=host_config,
    )
    return made["Id"]


def bounds_fields(spec: SandboxSpec) -> list[bytes]:
    """What the resident watches: processes, memory (by cgroups), unattached segments, files (not), rlimits."""
    memory = spec.memory_mb or DEFAULT_MEMORY_MB
    numbers = (spec.pids or DEFAULT_PIDS, 0, memory << 19, 0)
    return [*(str(number).encode() for number in numbers), b""]


def user_field(user: str | None) -> bytes:
    """A spec's user as the resident reads it."""
    return os.fsencode(user or "")
