"""Tasks to attack: tests in plain shell, tests in pytest, tests that download an installer first."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from termrl.attacks import ATTACKS, Attack, Group
from termrl.attacks.snippets import EVIL_C
from termrl.tasks.task import Task
from tests.attacks.backends import IMAGE
from tests.verifier.tiny import CHECK, tiny_task

PYTHON = "/usr/bin/python3"
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")

PYTEST_SH = """\
#!/bin/bash
python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""

TEST_OUTPUTS = """\
def test_answer():
    with open("/app/answer.txt") as file:
        assert file.read().strip() == open("/tests/expected.txt").read().strip()
"""

# As Terminal-Bench's scripts do it, from a file, so that it works without a network.
DOWNLOAD_SH = """\
#!/bin/bash
curl -LsSf file:///tests/install.sh | sh
source "$HOME/.local/bin/env"
uvx check
"""

INSTALL_SH = """\
mkdir -p "$HOME/.local/bin"
echo 'export PATH="$HOME/.local/bin:$PATH"' > "$HOME/.local/bin/env"
cp /tests/check.sh "$HOME/.local/bin/uvx"; chmod +x "$HOME/.local/bin/uvx"
"""


def shell_task(folder: Path, **fields: Any) -> Task:
    """Tests of bash and cat; the workdir has a library that pays itself where this machine can compile one."""
    task = tiny_task(folder, test=CHECK, **fields)
    add_evil_library(task)
    return task


def pytest_task(folder: Path, **fields: Any) -> Task:
    """A task whose tests bring pytest along."""
    env = {"PYTHONPATH": "/tests/lib", "PYTHONDONTWRITEBYTECODE": "1"}
    task = tiny_task(folder, test=PYTEST_SH, verifier_env=env, **fields)
    (task.tests / "test_outputs.py").write_text(TEST_OUTPUTS)
    copy_pytest(task.tests / "lib")
    return task


def installed_task(folder: Path, **fields: Any) -> Task:
    """A task whose tests use the pytest that the image has."""
    spec = {"image": python_image_of()}
    task = tiny_task(folder, test=PYTEST_SH, **{"spec": spec, **fields})
    (task.tests / "test_outputs.py").write_text(TEST_OUTPUTS)
    return task


def download_task(folder: Path, *, test: str = DOWNLOAD_SH, **fields: Any) -> Task:
    """A task whose tests download and install what runs them."""
    task = tiny_task(folder, test=test, **fields)
    (task.tests / "install.sh").write_text(INSTALL_SH)
    (task.tests / "check.sh").write_text(CHECK)
    return task


KINDS: dict[str, Callable[[Path], Task]] = {"shell": shell_task, "pytest": pytest_task, "download": download_task}
IMAGE_KINDS: dict[str, Callable[[Path], Task]] = {"installed": installed_task}

_GROUPS = {
    "shell": frozenset(Group) - {Group.PYTHON, Group.DOWNLOADS},
    "pytest": frozenset({Group.PYTHON}),
    "installed": frozenset({Group.PYTHON}),
    "download": frozenset({Group.DOWNLOADS, Group.TOOLS}),
}
# What is aimed at what these tests run on too.
_MORE = {
    "pytest": frozenset({"replaced-python", "replaced-everything", "shims-in-the-home", "shims-on-the-path"}),
    "installed": frozenset({"replaced-python", "replaced-everything", "shims-on-the-path"}),
    "download": frozenset({"replaced-tools", "replaced-sh"}),
}


def attacks_on(kind: str) -> tuple[Attack, ...]:
    """The attacks that a task of this kind could fall to."""
    more = _MORE.get(kind, frozenset())
    return tuple(attack for attack in ATTACKS if attack.group in _GROUPS[kind] or attack.name in more)


def copy_pytest(folder: Path, *packages: str) -> None:
    """Put pytest and what it needs, or ``packages``, into ``folder``."""
    for name in packages or PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
        shutil.copytree(package, folder / name, ignore=_needless)
        if name == "_pytest":
            shutil.copy(package.parent / "py.py", folder)


def _needless(folder: str, names: list[str]) -> set[str]:
    """Of the hundreds of lexers pytest uses two; each file is put into every sandbox."""
    if folder.endswith("lexers"):
        return set(names) - {"__init__.py", "_mapping.py", "python.py", "diff.py"}
    return {"__pycache__"} & set(names)


def add_evil_library(task: Task) -> None:
    """Put the library of the preload attacks into the task's workdir, where this machine has a compiler."""
    compiler = shutil.which("cc")
    if compiler is not None:
        target = task.path / "environment" / "evil.so"
        source = EVIL_C.encode()
        subprocess.run([compiler, "-shared", "-fPIC", "-o", target, "-xc", "-"], input=source, check=True)


PYTHON_IMAGE = f"termrl-test/python:attacks-{os.getpid()}"


@cache
def python_image_of() -> str:
    """Make the image whose Python has pytest and pip among its packages, and give its name."""
    import docker

    client = docker.from_env()
    container = client.containers.create(IMAGE, ["true"], labels={"termrl.test": "attacks"})
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy_pytest(Path(folder), *PACKAGES, "pip")
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w") as tar:
                tar.add(folder, arcname=".", filter=_roots)
        assert container.put_archive("/usr/lib/python3/dist-packages", stream.getvalue())
        container.commit(*PYTHON_IMAGE.split(":"))
    finally:
        container.remove(force=True)
        client.close()
    return PYTHON_IMAGE


def remove_python_image() -> None:
    """Remove the image that :func:`python_image_of` made."""
    import docker

    client = docker.from_env()
    try:
        client.images.remove(PYTHON_IMAGE, force=True)
    finally:
        client.close()
    python_image_of.cache_clear()


def _roots(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    return member
