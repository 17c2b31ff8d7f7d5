"""What a Docker daemon has and lacks, each finding with its fix."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from termrl.errors import TermrlError
from termrl.sandboxes import host
from termrl.sandboxes.docker.connection import Connection, said_by
from termrl.sandboxes.stage import stage

_OLDEST_API = (1, 41)
_FREE_MB = 10_240
_GOOD_DRIVERS = ("overlay2", "overlay", "btrfs", "zfs", "overlayfs", "fuse-overlayfs")
# Go's names of machines.
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}


@dataclass(frozen=True)
class Finding:
    """One finding, as ``termrl doctor`` shows it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    must: bool = True


def checks(state: Path | None = None, where: str | None = None) -> Iterator[Finding]:
    """Every check in order; after a daemon that cannot be asked, none of those about it."""
    yield _state(state)
    try:
        connection = Connection(where, threads=1)
    except TermrlError as error:
        yield Finding("daemon", False, error.message, error.hint or "")
        return
    try:
        info = connection.info
        yield _daemon(connection)
        yield _api_version(connection)
        yield _architecture(info)
        yield _shares_files(connection.host)
        yield _cgroups(info)
        yield _storage(info)
        yield _disk(info)
        yield _networks(connection)
    except Exception as error:
        yield Finding("daemon", False, f"stopped answering: {said_by(error)}", "see its log (journalctl -u docker)")
    finally:
        connection.close()


def _state(state: Path | None) -> Finding:
    try:
        staged = stage(host.state_folder(state), bubblewrap=False)
    except TermrlError as error:
        return Finding("resident", False, error.message, error.hint or "")
    return Finding("resident", True, f"the first process of containers is staged in {staged.folder}")


def _daemon(connection: Connection) -> Finding:
    detail = f"{connection.info.get('ServerVersion')} at {connection.host}"
    if not connection.podman:
        return Finding("daemon", True, detail)
    return Finding(
        "daemon",
        False,
        f"podman {detail}: a command can make user namespaces, and the kernel end its container when memory runs out",
        "both stay within the container, and cost that episode; Docker keeps commands from them",
        must=False,
    )


def _api_version(connection: Connection) -> Finding:
    version = str(connection.about["ApiVersion"])
    found = tuple(int(part) for part in version.split("."))
    wanted = ".".join(map(str, _OLDEST_API))
    return Finding("API", found >= _OLDEST_API, f"version {version}", f"{wanted} is needed: update Docker to 20.10")


def _architecture(info: Mapping[str, Any]) -> Finding:
    ours, theirs = platform.machine(), str(info.get("Architecture", ""))
    same = _MACHINES.get(ours, ours) == _MACHINES.get(theirs, theirs)
    detail = theirs if same else f"{theirs}, while this machine is {ours}"
    return Finding("architecture", same, detail, "use a daemon on this machine")


def _shares_files(where: str) -> Finding:
    local = where.startswith("unix://")
    return Finding(
        "same machine",
        local,
        "it sees this machine's files" if local else f"{where} may be another machine",
        "containers call back through this machine's files: use a daemon on this machine",
        must=False,
    )


def _cgroups(info: Mapping[str, Any]) -> Finding:
    names = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "CPU time"}
    missing = [name for key, name in names.items() if not info.get(key)]
    detail = f"version {info.get('CgroupVersion') or 1}, {info.get('CgroupDriver')}"
    if missing:
        detail += f"; not bounded: {', '.join(missing)}"
    fix = "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1), or enable the controllers"
    return Finding("cgroups", not missing, detail, fix, must=False)


def _storage(info: Mapping[str, Any]) -> Finding:
    driver = str(info.get("Driver"))
    backing = dict(info.get("DriverStatus") or []).get("Backing Filesystem", "unknown")
    detail = f"{driver} on {backing}"
    if driver not in _GOOD_DRIVERS:
        return Finding("storage", False, detail, 'slow: set "storage-driver": "overlay2"', must=False)
    if backing != "xfs":
        fix = "only overlay2 on xfs that is mounted with pquota bounds a container's files (storage_mb)"
        return Finding("storage", False, f"{detail}: files are not bounded", fix, must=False)
    return Finding("storage", True, detail, must=False)


def _disk(info: Mapping[str, Any]) -> Finding:
    root = str(info.get("DockerRootDir") or "/var/lib/docker")
    try:
        free = shutil.disk_usage(root).free >> 20
    except OSError as error:
        return Finding("disk", False, f"{root}: {error.strerror}", "it may be on another machine", must=False)
    return Finding(
        "disk", free >= _FREE_MB, f"{free} MiB free at {root}", "docker system prune frees space", must=False
    )


def _networks(connection: Connection) -> Finding:
    names = {one["Name"] for one in connection.client.api.networks()}
    fix = "start dockerd without --bridge=none and --iptables=false"
    detail = "bridge and none" if "bridge" in names else "no bridge: tasks with network_mode public are refused"
    return Finding("network", "bridge" in names, detail, fix, must=False)
