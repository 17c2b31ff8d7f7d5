"""The Dockerfile tasks of ``tests/dockertasks``, and a few that must be made: they hold programs of this machine."""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from pathlib import Path

from tests.tasks.helpers import write_task

FOLDER = Path(__file__).parents[1] / "dockertasks"
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
ALIAS = "debian:bookworm-slim"

_TOML = '[metadata]\nfamily = "docker"\n[environment]\nnetwork_mode = "no-network"\n'
_GRADE = "\nif [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def write_made_tasks(into: Path) -> None:
    """Tasks that need pip or pytest in their image, or a base image that only an alias makes available."""
    pip = _task(
        into / "pip-install",
        "Install the package greeter from the wheels in /opt/wheels.",
        "WORKDIR /app\nCOPY pip /opt/pip/pip\nCOPY wheels /opt/wheels\nENV PYTHONPATH=/opt/pip\n",
        solve="python3 -m pip install --quiet --break-system-packages --no-index --find-links /opt/wheels greeter",
        test='[ "$(python3 -c "import greeter; print(greeter.WORD)")" = hello ] && [ "$(greet)" = hello ]',
    )
    _copy_packages(pip / "environment", "pip")
    _write_wheel(pip / "environment" / "wheels")
    tested = _task(
        into / "pytest-vendored",
        "Write the first ten square numbers, beginning with 1, into /app/squares.txt, one on each line.",
        "WORKDIR /app\n",
        solve="for n in $(seq 10); do echo $((n * n)); done > squares.txt",
        test="PYTHONPATH=/tests/vendor python3 -m pytest -q -p no:cacheprovider /tests/test_squares.py",
    )
    check = 'assert Path("/app/squares.txt").read_text().split() == [str(n * n) for n in range(1, 11)]'
    text = f"from pathlib import Path\n\n\ndef test_squares():\n    {check}\n"
    (tested / "tests" / "test_squares.py").write_text(text)
    _copy_packages(tested / "tests" / "vendor", *PYTEST)
    _task(
        into / "aliased-base",
        "Create the empty file /app/done.",
        "WORKDIR /app\n",
        base=ALIAS,
        solve="touch done",
        test="[ -f done ]",
    )


def write_heredoc_task(folder: Path) -> Path:
    """A task whose Dockerfile needs a builder that knows heredocs."""
    return _task(
        folder,
        "Copy /etc/made to /app/made.",
        "WORKDIR /app\nRUN <<'EOF'\nset -e\nfor word in one ${{ two }}; do echo $word; done > /etc/made || true\nEOF\n",
        solve="cp /etc/made made",
        test="[ -f made ]",
    )


def _task(
    folder: Path, instruction: str, dockerfile: str, *, solve: str, test: str, base: str = "termrl-test/base:bookworm"
) -> Path:
    files: dict[str, str | bytes] = {
        "environment/Dockerfile": f"FROM {base}\n{dockerfile}",
        "solution/solve.sh": f"#!/bin/bash\nset -e\n{solve}\n",
    }
    return write_task(folder, toml=_TOML, instruction=instruction, test=f"#!/bin/bash\n{test}{_GRADE}", files=files)


def _copy_packages(into: Path, *names: str) -> None:
    into.mkdir(exist_ok=True)
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        if spec.submodule_search_locations:
            source = Path(spec.submodule_search_locations[0])
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__", "*.exe"))
        else:
            shutil.copy(spec.origin, into)


def _write_wheel(folder: Path) -> None:
    folder.mkdir()
    info = "greeter-1.0.dist-info"
    files = {
        "greeter.py": 'WORD = "hello"\n\n\ndef main():\n    print(WORD)\n',
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ngreet = greeter:main\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / "greeter-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)
