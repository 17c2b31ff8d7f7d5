"""Honest work that looks like tampering: installed packages, programs and libraries, changed settings. It must pass."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from termrl.environment.protocol import Action
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.sandboxes.base import SandboxProvider
from termrl.tasks.task import Task
from termrl.verifier.verdict import Verdict
from tests.attacks.kinds import PYTHON
from tests.verifier.tiny import SECRET, tiny_task


async def scored(provider: SandboxProvider, task: Task, *commands: str) -> Verdict:
    """The whole way of an episode, under the default rules."""
    environment = LocalEnvironmentFactory({task.id: task}, provider).create()
    try:
        await environment.reset(task.id)
        for command in commands:
            said = await environment.step(Action(command=command, wait_seconds=60))
            assert said.info["exit_code"] == 0, said.output
        return Verdict.model_validate((await environment.step(Action(action_type="evaluate"))).info["verdict"])
    finally:
        await environment.close()


def build_wheel(folder: Path) -> Path:
    """A wheel of one module, as a packager would make it."""
    info = "honest-1.0.dist-info"
    files = {
        "honest.py": f"ANSWER = {SECRET!r}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: honest\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    path = folder / "honest-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


# What the tests compare with; {} is what says the answer.
COMPARE = '[ "$({})" = "$(cat /tests/expected.txt)" ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt'
IMPORT = "python3 -c 'import honest; print(honest.ANSWER)'"


def has_pip(backend: str) -> bool:
    """Whether sandboxes see a pip."""
    if backend == "docker":
        return True
    return Path(PYTHON).exists() and subprocess.run([PYTHON, "-I", "-c", "import pip"]).returncode == 0


async def test_a_wheel_installed_into_the_workdir_passes(
    backend: str, provider: SandboxProvider, tmp_path: Path, python_image: str
) -> None:
    if not has_pip(backend):
        pytest.skip(f"{PYTHON} has no pip, so that sandboxes see none")
    spec = {"image": python_image} if backend == "docker" else {}
    task = tiny_task(tmp_path, test="export PYTHONPATH=/app/lib\n" + COMPARE.format(IMPORT), spec=spec)
    wheel = build_wheel(task.path / "environment").name
    assert (await scored(provider, task)).reward == 0.0
    install = f"python3 -m pip install --no-index --no-cache-dir --target lib ./{wheel}"
    verdict = await scored(provider, task, install)
    assert (verdict.reward, verdict.signals) == (1.0, {}), verdict


async def test_a_wheel_installed_into_the_system_passes(
    docker: SandboxProvider, tmp_path: Path, python_image: str
) -> None:
    task = tiny_task(tmp_path, test=COMPARE.format(IMPORT), spec={"image": python_image})
    wheel = build_wheel(task.path / "environment").name
    assert (await scored(docker, task)).reward == 0.0
    install = f"python3 -m pip install --no-index --no-cache-dir --break-system-packages ./{wheel}"
    verdict = await scored(docker, task, install)
    assert verdict.reward == 1.0, verdict


def build_package(folder: Path) -> None:
    """A repository with one Debian package of one program, as ``dpkg-deb`` and ``dpkg-scanpackages`` make them."""
    control = "Package: honest-tool\nVersion: 1.0\nArchitecture: all\nMaintainer: Nobody <nobody@example.org>\n"
    described = control + "Description: says the answer\n"
    program = f"#!/bin/sh\necho {SECRET}\n"
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": _tarball({"./control": (described, 0o644)}),
        "data.tar.gz": _tarball({"./usr/bin/honest-tool": (program, 0o755)}),
    }
    package = b"!<arch>\n"
    for name, data in members.items():
        package += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
        )
    (folder / "honest-tool_1.0_all.deb").write_bytes(package)
    digest = hashlib.sha256(package).hexdigest()
    entry = f"{control}Filename: ./honest-tool_1.0_all.deb\nSize: {len(package)}\nSHA256: {digest}\n"
    (folder / "Packages").write_text(entry + "Description: says the answer\n\n")


def _tarball(files: dict[str, tuple[str, int]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, (text, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), mode
            tar.addfile(info, io.BytesIO(text.encode()))
    return stream.getvalue()


async def test_a_package_installed_by_apt_passes(docker: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, test=COMPARE.format("honest-tool"))
    build_package(task.path / "environment")
    assert (await scored(docker, task)).reward == 0.0
    sources = (
        "rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*; chmod 755 /app; echo 'deb [trusted=yes] file:/app ./'"
    )
    verdict = await scored(
        docker,
        task,
        f"{sources} > /etc/apt/sources.list.d/local.list && apt-get -q update && apt-get -qy install honest-tool",
    )
    assert verdict.reward == 1.0, verdict
    assert {"test_tools", "download_config"} <= set(verdict.signals)


async def test_a_program_of_the_policys_own_in_usr_local_passes(docker: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, test=COMPARE.format("say-it"))
    verdict = await scored(
        docker, task, f"printf '#!/bin/sh\\necho {SECRET}\\n' > /usr/local/bin/say-it; chmod +x /usr/local/bin/say-it"
    )
    assert (verdict.reward, set(verdict.signals)) == (1.0, {"test_tools"}), verdict


async def test_changed_settings_of_the_system_stay_changed(docker: SandboxProvider, tmp_path: Path) -> None:
    test = COMPARE.format("grep -c '10.0.0.9 db' /etc/hosts /etc/motd | cut -d: -f2 | tr -d '\\n'")
    task = tiny_task(tmp_path, test=test)
    (task.tests / "expected.txt").write_text("11")
    verdict = await scored(docker, task, "echo '10.0.0.9 db' >> /etc/hosts; echo '10.0.0.9 db' >> /etc/motd")
    assert verdict.reward == 1.0, verdict


LIBRARY = 'const char *answer(void) { return "' + SECRET + '"; }'
CALL = (
    'python3 -c \'import ctypes; f = ctypes.CDLL("libhonest.so.1").answer; f.restype = ctypes.c_char_p;'
    " print(f().decode())'"
)


def build_library(compiler: str, target: Path) -> None:
    """A library that says the answer."""
    flags = ["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libhonest.so.1"]
    subprocess.run([compiler, *flags, "-o", target, "-xc", "-"], input=LIBRARY.encode(), check=True)


@pytest.mark.parametrize("honest", [True, False], ids=["a new name", "a name of the system"])
async def test_a_new_library_is_found_unless_it_comes_before_one_of_the_system(
    docker: SandboxProvider, tmp_path: Path, honest: bool
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a library with")
    task = tiny_task(tmp_path, test=COMPARE.format(CALL))
    made = task.path / "environment" / "libhonest.so.1"
    build_library(compiler, made)
    install = "cp libhonest.so.1 /usr/local/lib/ && ldconfig"
    shadow = "" if honest else "cp -L /lib/*/libz.so.1 /usr/local/lib/ && "
    verdict = await scored(docker, task, f"{shadow}{install}")
    assert verdict.reward == (1.0 if honest else 0.0), verdict
