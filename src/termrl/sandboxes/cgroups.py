"""Memory, process and CPU limits by cgroups, version 1 or 2, where this process may make groups; else nothing.

Groups are made beside or below the group that this process is in, named ``termrl-<owner>``, one sub-group for each
sandbox and one for the launcher. To move a process into a group takes the kernel up to 20 ms (it waits for an RCU grace
period), so a sandbox is moved while its caller does other things, and version 1's second hierarchy for processes is
used only where RLIMIT_NPROC does not do the same.

Interface: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "termrl-"

_V1 = ("memory", "pids", "cpu")
_PERIOD_US = 100_000


@dataclass(frozen=True)
class Roots:
    """Where groups can be made: one folder for version 2, one for each controller for version 1."""

    version: int
    folders: dict[str, Path]


def find_roots() -> Roots | None:
    """The groups below which this process may make its own with memory and process limits, or ``None``."""
    own = _own_groups()
    mounts = _mounts()
    unified = mounts.get("unified")
    if unified is not None and "" in own:
        current = unified / own[""].lstrip("/")
        for candidate in (current, *current.parents):
            if not candidate.is_relative_to(unified):
                break
            if _offers_v2(candidate):
                return Roots(2, {"unified": candidate})
    folders = {}
    for controller in _V1:
        if controller in mounts and controller in own:
            folder = mounts[controller] / own[controller].lstrip("/")
            if not folder.is_dir():
                folder = mounts[controller]
            if os.access(folder, os.W_OK):
                folders[controller] = folder
    return Roots(1, folders) if "memory" in folders else None


@dataclass
class Group:
    """One sandbox's cgroup (several folders in version 1)."""

    roots: Roots
    folders: list[Path] = field(default_factory=list)
    memory: Path | None = None

    def add(self, pid: int) -> None:
        """Move a process into it.

        Raises:
            OSError: not permitted.
        """
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """How many processes of it the kernel has killed for memory."""
        if self.memory is None:
            return 0
        name = "memory.events" if self.roots.version == 2 else "memory.oom_control"
        try:
            found = re.search(r"^oom_kill (\d+)", (self.memory / name).read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found.group(1)) if found else 0

    def remove(self) -> bool:
        """Remove it once it is empty; False while something still runs in it."""
        left = [folder for folder in self.folders if not _remove(folder)]
        return not left


class Groups:
    """The cgroups of one owner; ``pids`` says whether version 1 is to count processes."""

    def __init__(self, roots: Roots, owner: str, *, pids: bool) -> None:
        self.roots = roots
        names = [name for name in roots.folders if pids or name != "pids"]
        self.counts_processes = roots.version == 2 or "pids" in names
        self.shares_cpu = roots.version == 1 and "cpu" in names
        self._tops = {name: roots.folders[name] / f"{PREFIX}{owner}" for name in names}
        for top in self._tops.values():
            top.mkdir(exist_ok=True)
            if roots.version == 2:
                (top / "cgroup.subtree_control").write_text("+memory +pids")
                with contextlib.suppress(OSError):
                    (top / "cgroup.subtree_control").write_text("+cpu")
                    self.shares_cpu = True

    def adopt(self, pid: int) -> None:
        """Move the launcher into a group of its own, without limits, so that what it starts is moved within ours.

        Raises:
            OSError: not permitted; these groups cannot be used.
        """
        for top in self._tops.values():
            folder = top / "launcher"
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.procs").write_text(str(pid))

    def create(self, name: str, *, memory_bytes: int, pids: int, cpus: float | None) -> Group:
        """A group with limits; ``cpus`` ``None`` leaves CPU time unlimited.

        Raises:
            OSError: not permitted.
        """
        group = Group(self.roots)
        try:
            for controller, top in self._tops.items():
                if controller == "cpu" and cpus is None:
                    continue
                folder = top / name
                folder.mkdir()
                group.folders.append(folder)
            self._limit(group, memory_bytes, pids, cpus)
        except OSError:
            group.remove()
            raise
        return group

    def _limit(self, group: Group, memory_bytes: int, pids: int, cpus: float | None) -> None:
        by_name = {folder.parent: folder for folder in group.folders}
        by_name = {name: by_name[top] for name, top in self._tops.items() if top in by_name}
        if self.roots.version == 2:
            group.memory = by_name["unified"]
            (group.memory / "memory.max").write_text(str(memory_bytes))
            with contextlib.suppress(OSError):
                (group.memory / "memory.swap.max").write_text("0")
            (group.memory / "pids.max").write_text(str(pids))
            if cpus is not None:
                (group.memory / "cpu.max").write_text(f"{int(cpus * _PERIOD_US)} {_PERIOD_US}")
            return
        group.memory = by_name["memory"]
        (group.memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
        if "pids" in by_name:
            (by_name["pids"] / "pids.max").write_text(str(pids))
        if "cpu" in by_name and cpus is not None:
            (by_name["cpu"] / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (by_name["cpu"] / "cpu.cfs_quota_us").write_text(str(int(cpus * _PERIOD_US)))

    def remove(self) -> None:
        """Remove the owner's groups."""
        for top in self._tops.values():
            _remove_tree(top)


def groups_of_owners() -> list[Path]:
    """The top folders of every owner's groups, in every hierarchy; owner ``x`` has ``termrl-x``."""
    found = []
    for mount in set(_mounts().values()):
        for folder, names, _ in os.walk(mount):
            for name in [name for name in names if name.startswith(PREFIX)]:
                names.remove(name)
                found.append(Path(folder, name))
    return found


def remove_groups(top: Path) -> int:
    """Kill what runs in an owner's groups below ``top`` and remove them; returns how many groups there were."""
    return _remove_tree(top)


def _remove_tree(top: Path) -> int:
    if not top.is_dir():
        return 0
    below = [entry for entry in top.iterdir() if entry.is_dir()]
    for folder in (*below, top):
        give_up = time.monotonic() + 2.0
        while not _remove(folder) and time.monotonic() < give_up:
            with contextlib.suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.005)
    return len(below) + 1


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _own_groups() -> dict[str, str]:
    """Controller (``""`` for version 2) → path of this process's group."""
    groups = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _mounts() -> dict[str, Path]:
    """Controller (``unified`` for version 2) → where its hierarchy is mounted, if it can be written to."""
    mounts = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if "rw" not in options.split(","):
            continue
        if kind == "cgroup2":
            mounts["unified"] = Path(where)
        elif kind == "cgroup":
            for controller in _V1:
                if controller in options.split(","):
                    mounts[controller] = Path(where)
    return mounts


def _offers_v2(folder: Path) -> bool:
    """Whether groups with memory and pids limits can be made in ``folder`` (it may hold no processes itself)."""
    try:
        if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
            return False
        wanted = {"memory", "pids"}
        enabled = set((folder / "cgroup.subtree_control").read_text().split())
        if not wanted <= enabled:
            if not wanted <= set((folder / "cgroup.controllers").read_text().split()):
                return False
            (folder / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return False
    return True
