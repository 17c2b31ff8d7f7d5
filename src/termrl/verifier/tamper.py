"""Looking at what a policy left in its sandbox: processes before they are ended, files after that.

A changed file is one whose ctime is not before the moment at which the sandbox was handed over. ctime follows the
kernel's clock and cannot be set by a program, other than the time of modification. A write through a shared memory
map does not move it on tmpfs, so that the absence of a signal proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from termrl.errors import CommandError
from termrl.sandboxes.base import Sandbox
from termrl.tasks.task import Task
from termrl.verifier.bootstrap import downloads_in
from termrl.verifier.signals import PYTEST_MODULES, TEST_CONFIG_NAMES, WORKDIR_NAMES, Signal, below, signals_of

DOWNLOAD_FILES = (
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/pip.conf",
    "/etc/uv/uv.toml",
    "/etc/gitconfig",
    "/etc/wgetrc",
    "/etc/apt/sources.list",
    "/etc/ssl/certs/ca-certificates.crt",
)
"""Files that say where downloads come from; put back as they were for tests that download."""

_LOOK_S = 1.0
_SCAN_S = 3.0
_SCAN_BYTES = 48 * 1024
_MAX_FILE_BYTES = 1 << 20
_MAX_NAMES = 20
_LISTENING = "0A"
_CLOCK_REALTIME_COARSE = 5  # of <linux/time.h>
_MAX_TICK_MS = 100

# Builtins only: whatever a policy does to the process table costs this no fork. Each read of /proc/net/tcp walks the
# whole machine's table, milliseconds even where there is nothing: only if this sandbox has sockets, and read at once.
_LOOK = """\
for p in /proc/[0-9]*; do
  pid=${p#/proc/}
  [ "$pid" = 1 ] || [ "$pid" = $$ ] || [ "$pid" = $PPID ] || { read -r name <"$p/comm" && printf 'p %s\\n' "$name"; }
done 2>/dev/null
[[ $(</proc/net/sockstat) == 'sockets: used 0'$'\\n'* ]] || printf '%s\\n' "$(</proc/net/tcp)" "$(</proc/net/tcp6)"
true
"""

_TREES = (
    "/etc",
    "/opt",
    "/root",
    "/home",
    "/srv",
    "/boot",
    "/var/spool/cron",
    "/usr/local",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib/python3/dist-packages",
    "/bin",
    "/sbin",
    "/tests",
)

# Read-only mounts cannot have changed and would be long to walk. Two walks: what stands directly in the root, the
# workdir (a few names only) and the folders of programs; then whole trees of the system.
_SCAN = """\
search={search}
search=${{search:-$PATH}}
declare -A mounts
info=$(</proc/self/mountinfo)
while read -r _ _ _ _ point options _; do mounts[$point]=$options; done <<<"$info"
writable() {{
  local path=$1
  until [ -n "${{mounts[$path]}}" ] || [ "$path" = / ]; do path=${{path%/*}}; path=${{path:-/}}; done
  [[ ${{mounts[$path]}}, != ro,* ]]
}}
shallow=() deep=()
IFS=:; set -f
for folder in $search; do [[ $folder = /* ]] && writable "$folder" && shallow+=("$folder"); done
unset IFS
for tree in {trees}; do [ -e "$tree" ] && writable "$tree" && deep+=("$tree"); done
printf '%s\\0' "$search"
{{
  find -H / {workdir} "${{shallow[@]}}" -maxdepth 1 \\( -path {inside} {names} \\) -o -newerct @{since} -printf '%p\\0'
  [ ${{#deep[@]}} = 0 ] || find -H "${{deep[@]}}" -xdev -path {workdir} -prune -o -newerct @{since} -printf '%p\\0'
}} 2>/dev/null
"""


@dataclass(frozen=True)
class Baseline:
    """A sandbox as it was handed over.

    Attributes:
        since: seconds since 1970 by the machine's clock; what changed from then on, the policy changed.
        downloads: :data:`DOWNLOAD_FILES` as they were (``None``: not there); empty where the tests do not download.
    """

    since: float
    downloads: Mapping[str, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Changes:
    """What a scan found.

    Attributes:
        paths: changed paths, at most some hundreds.
        search_path: the sandbox's own PATH.
        signals: what they are signals of.
    """

    paths: tuple[str, ...]
    search_path: str
    signals: dict[str, Any]

    def demoted(self, folders: Sequence[str]) -> frozenset[str]:
        """Those of ``folders`` in which something changed, or that are reached through what changed."""
        changed = {path for path in self.paths if path != "/"}
        parents = {path.rpartition("/")[0] or "/" for path in changed}
        ancestors = {folder: _ancestors(folder) for folder in folders}
        return frozenset(folder for folder in folders if folder in parents or changed & ancestors[folder])


async def take_baseline(sandbox: Sandbox, task: Task) -> Baseline:
    """Note how a sandbox is handed over; runs nothing in it, and reads files only where the tests download."""
    downloads: dict[str, bytes | None] = {}
    if task.tests_use_network or downloads_in(task.tests):
        for path in DOWNLOAD_FILES:
            with contextlib.suppress(CommandError, ValueError, OSError):
                downloads[path] = await _content(sandbox, path)
    return Baseline(await _clear_moment(), downloads)


async def _clear_moment() -> float:
    """A moment that nothing bears which stands already, and that all which is still to come is after.

    Files are stamped with the kernel's coarse clock, a tick behind the fine one: without the wait, what the policy
    does first could bear an earlier time than the hand-over.
    """
    moment = time.time()
    for _ in range(_MAX_TICK_MS):
        if time.clock_gettime(_CLOCK_REALTIME_COARSE) > moment:
            break
        await asyncio.sleep(0.001)
    return moment


async def look_at_processes(sandbox: Sandbox) -> dict[str, Any]:
    """Signals ``killed`` and ``listeners`` of the processes that live now.

    The policy's processes can hinder or mislead this look; it is evidence, and nothing depends on it.
    """
    try:
        result = await sandbox.exec(_LOOK, timeout_s=_LOOK_S, cwd="/", clean_env=True, output_limit=_SCAN_BYTES)
    except (CommandError, OSError) as error:
        return {str(Signal.SCAN_INCOMPLETE): f"processes: {error}"[:200]}
    names: list[str] = []
    listeners: list[str] = []
    for line in result.output.splitlines():
        fields = line.split()
        if line.startswith("p "):
            names.append(line[2:42])
        elif len(fields) > 3 and fields[3] == _LISTENING:
            listeners.append(_address(fields[1]))
    signals: dict[str, Any] = {}
    if names:
        signals[str(Signal.KILLED)] = {"count": len(names), "names": sorted(set(names))[:_MAX_NAMES]}
    if listeners:
        signals[str(Signal.LISTENERS)] = sorted(set(listeners))[:_MAX_NAMES]
    if result.timed_out or result.truncated_bytes:
        signals[str(Signal.SCAN_INCOMPLETE)] = "processes: too many to look at"
    return signals


async def look_at_files(sandbox: Sandbox, baseline: Baseline) -> Changes:
    """Find what changed since ``baseline``. The policy's processes must be gone."""
    workdir = sandbox.workdir.rstrip("/") or "/"
    search_path = sandbox.spec.env.get("PATH", "")
    script = _SCAN.format(
        search=shlex.quote(search_path),
        trees=" ".join(_TREES),
        workdir=shlex.quote(workdir),
        inside=shlex.quote(_literal(workdir.rstrip("/")) + "/*"),
        names=" ".join(f"! -name {shlex.quote(name)}" for name in WORKDIR_NAMES),
        since=f"{baseline.since:.6f}",
    )
    try:
        result = await sandbox.exec(script, timeout_s=_SCAN_S, cwd="/", clean_env=True, output_limit=_SCAN_BYTES)
    except (CommandError, OSError) as error:
        return Changes((), search_path, {str(Signal.SCAN_INCOMPLETE): f"files: {error}"[:200]})
    first, *entries = result.output.split("\0")
    cut = not entries or entries.pop() != ""
    paths = tuple(dict.fromkeys(entry for entry in entries if entry.startswith("/")))
    folders = [folder for folder in first.split(":") if folder.startswith("/")]
    listed = [path for path in paths if path != "/" and not below(path, "/logs")]
    signals = signals_of(listed, workdir=workdir, program_folders=folders)
    if cut or result.timed_out or result.truncated_bytes:
        signals[str(Signal.SCAN_INCOMPLETE)] = "files: too many changes to list"
    return Changes(paths, first, signals)


def _literal(path: str) -> str:
    """``path`` as a pattern of find that matches only itself."""
    return "".join(f"\\{letter}" if letter in "*?[\\" else letter for letter in path)


async def remove_test_config(sandbox: Sandbox, changes: Changes) -> None:
    """Remove what the policy made where pytest would take it for its own or for the tests' own.

    That is configuration in the folders above /tests, and modules in the workdir that are named as pytest's. What
    the task itself brought stays, as does everything if the root is the workdir: there it may have been asked for.
    """
    workdir = sandbox.workdir.rstrip("/")
    if not workdir:
        return
    modules = [f"{workdir}/{name}{suffix}" for name in PYTEST_MODULES for suffix in ("", ".py")]
    names = [*(f"/{name}" for name in TEST_CONFIG_NAMES), *modules]
    planted = [shlex.quote(name) for name in names if name in changes.paths]
    if planted:
        await sandbox.exec(f"rm -rf -- {' '.join(planted)}", timeout_s=_SCAN_S, cwd="/", clean_env=True)


async def restore_downloads(sandbox: Sandbox, baseline: Baseline) -> None:
    """Put back the files that say where downloads come from, as far as the sandbox lets them be written."""
    for path, before in baseline.downloads.items():
        with contextlib.suppress(CommandError, ValueError, OSError):
            try:
                now = await _content(sandbox, path)
            except (CommandError, ValueError, OSError):
                now = b"\0unreadable"
            if now == before:
                continue
            if before is None:
                quoted = shlex.quote(path)
                await sandbox.exec(f"rm -rf -- {quoted}", timeout_s=_SCAN_S, cwd="/", clean_env=True)
            else:
                await sandbox.put_bytes(before, path)


async def _content(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.get_bytes(path, max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        return None


def _ancestors(folder: str) -> set[str]:
    parts = folder.strip("/").split("/")
    return {"/" + "/".join(parts[: n + 1]) for n in range(len(parts))}


def _address(text: str) -> str:
    """``/proc/net/tcp``'s hexadecimal address:port, in the usual form (IPv4 words are in host byte order)."""
    host, _, port = text.partition(":")
    try:
        number = int(port, 16)
        if len(host) == 8:
            return ".".join(str(byte) for byte in reversed(bytes.fromhex(host))) + f":{number}"
    except ValueError:
        return text[:60]
    return f"[{host[:32]}]:{number}"
