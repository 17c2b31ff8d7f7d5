"""Tasks of every kind of soundness, written as Harbor folders."""

from __future__ import annotations

from pathlib import Path

from tests.tasks.helpers import MINIMAL, write_task

LIMITS = "memory_mb = 128\nstorage_mb = 16\n"
TOML = MINIMAL + LIMITS + "[verifier]\ntimeout_sec = 20.0\n"
NETWORK = TOML.replace("no-network", "public")
CHECK = "[ -e done ] && echo 1 > /logs/verifier/reward.txt || { echo not done; echo 0 > /logs/verifier/reward.txt; }\n"
SOLVE = "touch done\n"


def add(
    folder: Path, name: str, *, test: str = CHECK, solve: str | None = SOLVE, toml: str = TOML, **files: str
) -> Path:
    """A task that is sound unless told otherwise."""
    named = {path.replace("__", "/").replace("_dot_", "."): text for path, text in files.items()}
    if solve is not None:
        named["solution/solve.sh"] = solve
    return write_task(folder / name, toml=toml, test=test, files=named)


def add_all_kinds(folder: Path) -> dict[str, str]:
    """One task of each kind; their names with the status that each must get."""
    reward = "/logs/verifier/reward.txt"
    add(folder, "good")
    add(folder, "wrong-solution", solve="echo tried; touch undone; exit 3\n")
    add(folder, "gift", test=f"echo 1 > {reward}\n")
    add(folder, "unsolved", solve=None)
    add(
        folder,
        "unreadable",
        test=f"python3 /tests/check.py && echo 1 > {reward} || echo 0 > {reward}\n",
        tests__check_dot_py="def f(:\n",
    )
    add(folder, "half-windows", test=f"#!/bin/bash\nif true; then\r\n  echo 1 > {reward}\nfi\n")
    add(folder, "windows", test=f"#!/bin/bash\r\necho 1 > {reward}\r\n")
    add(folder, "mute", test="echo nothing to say\n")
    add(folder, "hangs", test="sleep 60\n", toml=TOML.replace("20.0", "0.5"))
    add(folder, "downloads", test="echo 'curl: (6) Could not resolve host: x' # curl x\n")
    add(folder, "wants-network", toml=NETWORK)
    add(folder, "needs-variable", toml=TOML + '[verifier.env]\nKEY = "${TERMRL_NOT_SET}"\n')
    add(folder, "takes-tests-away", solve=SOLVE + "rm -rf /tests; mkdir /tests; touch /tests/test.sh\n")
    write_task(folder / "no-toml", toml=None)
    return {
        "good": "sound",
        "takes-tests-away": "sound",
        "wrong-solution": "oracle_fails",
        "gift": "passes_untouched",
        "unsolved": "no_solution",
        "unreadable": "tests_cannot_pass",
        "half-windows": "tests_cannot_pass",
        "windows": "broken",
        "mute": "no_test_verdict",
        "hangs": "no_test_verdict",
        "downloads": "bootstrap_failed",
        "wants-network": "refused",
        "needs-variable": "refused",
        "no-toml": "broken",
    }
