"""``termrl doctor``: what this machine has, what it lacks, and the exact fix for that.

With ``--sandbox`` it runs the conformance suite against that backend instead.
"""

from __future__ import annotations

import asyncio
import importlib
import json as json_module
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from termrl.errors import ConfigError, TermrlError
from termrl.sandboxes import host
from termrl.sandboxes.base import RESOURCES

app = App(name="doctor", help="Check this machine and say how to fix what is missing.")

_MEMORY_MB = 4096
_DISK_MB = 2560
_OPEN_FILES = 4096
# Setting, the value that refuses user namespaces, the value that allows them.
_SYSCTLS = (
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("user.max_user_namespaces", "0", "15000"),
)


@dataclass(frozen=True)
class Check:
    """One finding. ``must`` says that nothing works without it; ``fix`` is what to type or change if not ``ok``."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    must: bool = True


@app.default
def doctor(
    *,
    json: bool = False,
    state: Path | None = None,
    sandbox: str | None = None,
    check: Sequence[str] = (),
    image: str | None = None,
    config: Annotated[tuple[Path, ...], Parameter(name=["--config", "-c"], negative="")] = (),
) -> int:
    """Check user namespaces, bubblewrap, a real sandbox, cgroups, memory, open files, disk and the model cache.

    With --sandbox: run the conformance suite against that backend (about a minute) and say which limits hold. With
    --sandbox docker it is the daemon that is checked, and the suite is run where --image says from what.
    Exit code 1 if something that everything needs is missing, or if the backend fails a check.

    Parameters
    ----------
    json
        Print objects instead of a table.
    state
        The state folder; the default one if not given.
    sandbox
        The backend to check, for example bubblewrap.
    check
        With --sandbox: only this check; can be given several times.
    image
        With --sandbox docker: the image that the suite's containers are made from; it needs bash and coreutils.
    config
        With --sandbox: TOML file of termrl train, whose [sandbox.settings] (if it is of that backend) and [images] are
        used.
    """
    if sandbox is not None and (sandbox != "docker" or image is not None):
        from termrl.cli.conformance import conform

        return conform(sandbox, _settings(sandbox, config, state), only=check, as_json=json, image=image)
    if check:
        hint = "termrl doctor --sandbox bubblewrap --check NAME, or --sandbox docker --image NAME --check NAME"
        raise ConfigError("--check: only where the conformance suite is run", hint=hint)
    if sandbox == "docker":
        from termrl.sandboxes.docker.doctor import checks as docker_checks

        given = _settings(sandbox, config, state)
        where = Path(given["state"]) if "state" in given else None
        return _report((Check(**asdict(one)) for one in docker_checks(where, given.get("host"))), as_json=json)
    return _report(checks(state), as_json=json)


def _settings(sandbox: str, files: tuple[Path, ...], state: Path | None) -> dict[str, Any]:
    """What the backend is opened with, as JSON can hold it."""
    from termrl.config import SandboxConfig, TrainConfig
    from termrl.settings import load_settings

    given = load_settings(TrainConfig, files=files, environ=os.environ).config
    mine = given.sandbox if given.sandbox.backend == sandbox else SandboxConfig(backend=sandbox)
    settings = mine.provider_settings(given.images)
    if "images" in settings:
        settings["images"] = given.images.model_dump(mode="json", exclude_defaults=True)
    return settings if state is None else {**settings, "state": str(state)}


def _report(all_checks: Iterable[Check], *, as_json: bool) -> int:
    found = []
    for one in all_checks:
        found.append(one)
        if not as_json:
            _show(one)
    if as_json:
        print(json_module.dumps([asdict(one) for one in found], indent=2))
    failed = [one.name for one in found if one.must and not one.ok]
    if failed and not as_json:
        print(f"\nmissing: {', '.join(failed)}")
    return 1 if failed else 0


def checks(state: Path | None = None) -> Iterator[Check]:
    """Every check in order, each run as it is asked for."""
    yield _python()
    yield _user_namespaces()
    yield _bwrap()
    yield _sandbox(state)
    yield _cgroups()
    yield _limits(state)
    yield _memory()
    yield _open_files()
    yield _disk(state)
    yield _model_cache()


def _show(check: Check) -> None:
    word = "ok  " if check.ok else "FAIL" if check.must else "warn"
    print(f"{word}  {check.name:<16} {check.detail}")
    if not check.ok and check.fix:
        for line in check.fix.splitlines():
            print(f"{'':24}fix: {line}")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), f"{version} at {sys.executable}", "use Python 3.11 or later")


def namespaces_fix(read: Callable[[str], str | None]) -> str:
    """The exact fix for a machine that refuses user namespaces.

    Args:
        read: the stripped text of a file, ``None`` where there is none.
    """
    for key, bad, good in _SYSCTLS:
        if read("/proc/sys/" + key.replace(".", "/")) == bad:
            return (
                f"sudo sysctl -w {key}={good}\n"
                f"and to keep it: echo {key}={good} | sudo tee /etc/sysctl.d/60-termrl.conf"
            )
    if read("/.dockerenv") is not None or read("/run/.containerenv") is not None:
        return (
            "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined"
        )
    return "a security module or the container that this runs in blocks user namespaces: allow them for bubblewrap"


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _user_namespaces() -> Check:
    name = "user namespaces"
    if not Path("/proc/self/ns/user").exists():
        return Check(name, False, "the kernel has none", "use a kernel with CONFIG_USER_NS=y")
    most = _read("/proc/sys/user/max_user_namespaces")
    for path, bad in (
        ("/proc/sys/user/max_user_namespaces", "0"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
    ):
        if _read(path) == bad:
            return Check(name, False, f"{path} is {bad}", namespaces_fix(_read))
    restricted = _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1"
    note = ", restricted by AppArmor (the sandbox check below decides)" if restricted else ""
    return Check(name, True, f"at most {most}{note}")


def _bwrap() -> Check:
    try:
        program, version = host.find_bwrap()
    except TermrlError as error:
        return Check("bubblewrap", False, error.message, error.hint or "")
    return Check("bubblewrap", True, f"{'.'.join(map(str, version))} at {program}")


def _sandbox(state: Path | None) -> Check:
    """Start a real sandbox and run a command in it."""
    try:
        detail = asyncio.run(_try_sandbox(state))
    except TermrlError as error:
        blocked = "start" in error.message and "bwrap:" in error.message
        return Check("sandbox", False, error.message, namespaces_fix(_read) if blocked else error.hint or "")
    return Check("sandbox", True, detail)


async def _try_sandbox(state: Path | None) -> str:
    import time

    from termrl.sandboxes.base import SandboxSpec
    from termrl.sandboxes.bubblewrap import BubblewrapProvider

    async with BubblewrapProvider(state=state) as provider:
        begin = time.perf_counter()
        sandbox = await provider.create(SandboxSpec("doctor", host_userland=True))
        created = time.perf_counter()
        result = await sandbox.exec("echo works", timeout_s=20)
        ended = time.perf_counter()
        if result.output != "works\n":
            raise TermrlError(f"the sandbox answers {result.output!r} with exit status {result.exit_code}")
        return f"started in {(created - begin) * 1e3:.0f} ms, command in {(ended - created) * 1e3:.0f} ms"


def _cgroups() -> Check:
    from termrl.sandboxes.cgroups import find_roots

    roots = find_roots()
    if roots is not None:
        return Check("cgroups", True, f"version {roots.version}: memory and processes are limited by them", must=False)
    return Check(
        "cgroups",
        False,
        "none can be made: resource limits (rlimits), sized tmpfs and watching are used instead",
        "optional: systemd-run --user --scope -p Delegate=yes termrl …",
        must=False,
    )


def _limits(state: Path | None) -> Check:
    """What bounds each resource of a sandbox here; ``--sandbox`` puts that to the test."""
    try:
        found = asyncio.run(_find_limits(state))
    except TermrlError as error:
        return Check("limits", False, error.message, error.hint or "", must=False)
    detail = "; ".join(f"{resource} by {by}" for resource, by in found.items())
    missing = [resource for resource in RESOURCES if resource not in found]
    if not missing:
        return Check("limits", True, detail, must=False)
    return Check(
        "limits", False, f"not bounded: {', '.join(missing)}; {detail}", "only cgroups bound it: see above", must=False
    )


async def _find_limits(state: Path | None) -> dict[str, str]:
    from termrl.sandboxes.bubblewrap import BubblewrapProvider

    async with BubblewrapProvider(state=state) as provider:
        return provider.limits


def _memory() -> Check:
    lines = (_read("/proc/meminfo") or "").splitlines()
    available = next((int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable")), 0)
    detail = f"{available} MiB available of {host.memory_mb()}"
    return Check("memory", available >= _MEMORY_MB, detail, f"{_MEMORY_MB} MiB are needed to train", must=False)


def _open_files() -> Check:
    soft, _ = host.raise_open_files()
    fix = f"ulimit -n {_OPEN_FILES}, or raise nofile in /etc/security/limits.conf"
    return Check("open files", soft >= _OPEN_FILES, f"at most {soft}", fix, must=False)


def _disk(state: Path | None) -> Check:
    try:
        folder = host.state_folder(state)
    except TermrlError as error:
        return Check("disk", False, error.message, error.hint or "")
    free = shutil.disk_usage(folder).free >> 20
    return Check("disk", free >= _DISK_MB, f"{free} MiB free at {folder}", f"{_DISK_MB} MiB are needed", must=False)


def _model_cache() -> Check:
    fix = "make setup fetches and converts the bundled model"
    try:
        bundled = importlib.import_module("termrl.engine.bundled")
    except ImportError as error:
        return Check("model cache", False, f"the training extra is not installed ({error})", fix, must=False)
    try:
        folder = bundled.cached_model()
    except TermrlError as error:
        return Check("model cache", False, error.message, error.hint or fix, must=False)
    if folder is None:
        return Check("model cache", False, "the bundled model is not there yet", fix, must=False)
    return Check("model cache", True, str(folder), must=False)
