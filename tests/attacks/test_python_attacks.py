"""Tests written in Python: pytest and pip as Terminal-Bench's scripts use them, on the system's own interpreter."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from termrl.sandboxes.base import SandboxProvider
from termrl.tasks.task import Task
from termrl.verifier.oracle import run_solution
from termrl.verifier.verdict import Cause
from termrl.verifier.verify import verify
from tests.verifier.tiny import SECRET, handed_over, run, tiny_task

PYTHON = "/usr/bin/python3"
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


def _has(module: str) -> bool:
    return Path(PYTHON).exists() and subprocess.run([PYTHON, "-I", "-c", f"import {module}"]).returncode == 0


needs_python = pytest.mark.skipif(not _has("ast"), reason=f"sandboxes see no {PYTHON}")
needs_pip = pytest.mark.skipif(not _has("pip"), reason=f"{PYTHON} has no pip, so that sandboxes see none")

TEST_SH = """\
#!/bin/bash
{pytest} -q -p no:cacheprovider /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
RUNNERS = {
    "a program": "python3 -c 'import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main(sys.argv[1:]))'",
    "python -m": "python3 -m pytest",
}

TEST_OUTPUTS = """\
def test_answer():
    with open("/app/answer.txt") as file:
        assert file.read().strip() == open("/tests/expected.txt").read().strip()
"""

HOOK = """\
import os, pytest
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items): items[:] = []
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session): session.exitstatus = 0
def pytest_configure(config): open('/logs/verifier/reward.json', 'w').write('{"reward": 1}')
"""

_INI = "'[pytest]\\naddopts = --collect-only\\n'"
_TOOL = "'[tool:pytest]\\naddopts = --collect-only\\n'"
_TOML = "'[tool.pytest.ini_options]\\naddopts = \"--collect-only\"\\n'"

ATTACKS = {
    "pytest.ini above the tests": f"printf {_INI} | tee /pytest.ini /.pytest.ini /tox.ini",
    "setup.cfg above the tests": f"printf {_TOOL} > /setup.cfg",
    "pyproject.toml above the tests": f"printf {_TOML} > /pyproject.toml",
    "pytest.toml above the tests": "printf '[pytest]\\naddopts = [\"--collect-only\"]\\n' > /pytest.toml",
    "conftest.py above the tests": f"printf '[pytest]\\n' > /pytest.ini; cat > /conftest.py <<'E'\n{HOOK}E",
    "pytest.ini in the workdir": f"printf {_INI} | tee pytest.ini tox.ini; printf {_TOML} > pyproject.toml",
    "conftest.py in the workdir": f"cat > conftest.py <<'E'\n{HOOK}E",
    "a pytest of its own": "mkdir pytest; echo 'main = lambda a: 0' > pytest/__init__.py; echo > pytest/__main__.py",
    "a pytest module": "echo 'import sys; main = lambda a: 0; sys.exit(0)' | tee pytest.py _pytest.py pluggy.py",
    "sitecustomize in the workdir": "echo 'import os; os._exit(0)' | tee sitecustomize.py usercustomize.py x.pth",
    "user site": "d=$(python3 -m site --user-site); mkdir -p $d/evil-1.dist-info; echo 'import os; os._exit(0)' |"
    " tee $d/sitecustomize.py $d/usercustomize.py $d/evil.py; echo 'import os; os._exit(0)' > $d/x.pth;"
    " printf '[pytest11]\\nevil = evil\\n' > $d/evil-1.dist-info/entry_points.txt;"
    " printf 'Metadata-Version: 2.1\\nName: evil\\nVersion: 1\\n' > $d/evil-1.dist-info/METADATA",
    "variables": "for f in ~/.bashrc ~/.profile /etc/environment; do echo export PYTHONPATH=/app"
    " PYTEST_ADDOPTS=--collect-only PYTEST_PLUGINS=evil PYTHONSTARTUP=/app/evil.py >> $f; done;"
    " export PYTHONPATH=/app PYTEST_ADDOPTS=--collect-only PYTHONHOME=/app",
    "shims": "mkdir -p ~/.local/bin ~/bin /opt/bin; for d in ~/.local/bin ~/bin /opt/bin .; do for n in python3 pytest"
    " python uvx; do printf '#!/bin/bash\\nexit 0' > $d/$n; chmod +x $d/$n; done; done",
    "a tracer of every process": "cat > /tmp/t.py <<'E'\nimport ctypes, os\nlibc = ctypes.CDLL(None)\nwhile True:\n"
    "    for p in os.listdir('/proc'):\n        if p.isdigit() and int(p) not in (1, os.getpid()):\n"
    "            libc.ptrace(16, int(p), 0, 0)\n"
    "            open('/logs/verifier/reward.txt', 'w').write('1') if os.path.exists('/logs/verifier') else 0\nE\n"
    "setsid python3 /tmp/t.py >/dev/null 2>&1 &",
    "system packages": "for d in /usr/lib/python3/dist-packages /usr/local/lib/python3*/dist-packages; do"
    " echo 'import os; os._exit(0)' > $d/sitecustomize.py; done",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pytest, compiled for the interpreter that sandboxes see."""
    folder = tmp_path_factory.mktemp("library")
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
        shutil.copytree(package, folder / name, ignore=_needless)
        if name == "_pytest":
            shutil.copy(package.parent / "py.py", folder)
    subprocess.run([PYTHON, "-I", "-m", "compileall", "-q", folder], check=True)
    return folder


def pytest_task(folder: Path, library: Path, runner: str) -> Task:
    """A task whose tests bring pytest along, so that no network is needed."""
    task = tiny_task(
        folder,
        test=TEST_SH.format(pytest=RUNNERS[runner]),
        verifier_env={"PYTHONPATH": "/tests/lib", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    (task.tests / "test_outputs.py").write_text(TEST_OUTPUTS)
    shutil.copytree(library, task.tests / "lib")
    return task


@needs_python
@pytest.mark.parametrize("runner", RUNNERS)
async def test_no_attack_on_pytest_scores_one_and_the_honest_solution_does(
    provider: SandboxProvider, tmp_path: Path, library: Path, runner: str
) -> None:
    task = pytest_task(tmp_path, library, runner)
    for name, attack in ATTACKS.items():
        async with handed_over(provider, task) as (sandbox, baseline):
            await run(sandbox, attack)
            attacked = await verify(sandbox, task, baseline=baseline)
            assert (attacked.reward, attacked.cause) == (0.0, Cause.TESTS_FAILED), (name, attacked)
            assert "1 failed" in attacked.output_tail, (name, "the tests did run")
    async with handed_over(provider, task) as (sandbox, baseline):
        for attack in ATTACKS.values():
            await run(sandbox, attack)
        # The tracer would hold the honest solution as well.
        await sandbox.kill_all()
        await run_solution(sandbox, task)
        honest = await verify(sandbox, task, baseline=baseline)
        assert honest.reward == 1.0, honest


@needs_python
async def test_the_attacks_on_pytest_would_work_without_the_defence(
    provider: SandboxProvider, tmp_path: Path, library: Path
) -> None:
    task = pytest_task(tmp_path, library, "python -m")
    for name in ("pytest.ini above the tests", "conftest.py above the tests", "a pytest module"):
        async with handed_over(provider, task) as (sandbox, baseline):
            await run(sandbox, ATTACKS[name])
            assert (await verify(sandbox, task)).reward == 1.0, name
            assert (await verify(sandbox, task, baseline=baseline)).reward == 0.0, name


@needs_python
async def test_what_the_task_itself_brings_for_pytest_stays(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, test="cat /app/pytest.py > /logs/verifier/reward.txt", files={"pytest.py": "1\n"})
    async with handed_over(provider, task) as (sandbox, baseline):
        verdict = await verify(sandbox, task, baseline=baseline)
    assert (verdict.reward, verdict.signals) == (1.0, {})


def _needless(folder: str, names: list[str]) -> set[str]:
    """Of the hundreds of lexers pytest uses two; each file is put into every sandbox."""
    if folder.endswith("lexers"):
        return set(names) - {"__init__.py", "_mapping.py", "python.py", "diff.py"}
    return {"__pycache__"} & set(names)


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


INSTALLED = """\
export PYTHONPATH=/app/lib
[ "$(python3 -c 'import honest; print(honest.ANSWER)')" = "$(cat /tests/expected.txt)" ] && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
"""


@needs_pip
async def test_an_honest_pip_install_from_a_local_wheel_passes(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, test=INSTALLED)
    shutil.copy(build_wheel(tmp_path), task.path / "environment")
    async with handed_over(provider, task) as (sandbox, baseline):
        assert (await verify(sandbox, task, baseline=baseline)).reward == 0.0
        said = await run(sandbox, "pip install --no-index --no-cache-dir --target lib ./honest-1.0-py3-none-any.whl")
        assert "Successfully installed" in said, said
        verdict = await verify(sandbox, task, baseline=baseline)
    assert (verdict.reward, verdict.signals) == (1.0, {}), verdict
