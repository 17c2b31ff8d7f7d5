"""The tasks that tests/upstream needs a server to have: ``python -m tests.upstream.tasks FOLDER`` writes them.

They are ordinary Harbor folders that use nothing but bash, so that any Terminal-Bench-2 server can run them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ANSWER = "forty-two"
SOLVE = f"echo {ANSWER} > answer.txt"
WORKDIR = "/app"
VERIFIER_TIMEOUT_S = 20.0

SOLVABLE = "write-answer"
NO_REWARD = "no-reward"
BAD_REWARD = "bad-reward"
SLOW_TESTS = "slow-tests"

_INSTRUCTION = f"Write the word {ANSWER} to the file answer.txt in the current directory.\n"
_CHECK = f"""\
#!/bin/bash
echo "checked in $PWD"
if [ "$(cat answer.txt 2>/dev/null)" = {ANSWER} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
_TESTS = {
    SOLVABLE: (_CHECK, VERIFIER_TIMEOUT_S),
    NO_REWARD: ("#!/bin/bash\necho 'the toolchain is not there'\nexit 3\n", VERIFIER_TIMEOUT_S),
    BAD_REWARD: ("#!/bin/bash\necho banana > /logs/verifier/reward.txt\n", VERIFIER_TIMEOUT_S),
    SLOW_TESTS: ("#!/bin/bash\nsleep 30\necho 1 > /logs/verifier/reward.txt\n", 2.0),
}


def write_tasks(folder: Path, *, image: str | None = None) -> Path:
    """Write every task below ``folder``.

    Args:
        image: what servers that start containers run; it must have ``/app``. Without one the tasks are for sandboxes
            over this machine's own files.
    """
    for name, (test, timeout_s) in _TESTS.items():
        root = folder / name
        for sub in ("environment", "tests", "solution"):
            (root / sub).mkdir(parents=True, exist_ok=True)
        (root / "instruction.md").write_text(_INSTRUCTION)
        (root / "task.toml").write_text(_config(image, timeout_s))
        if image is not None:
            (root / "environment" / "Dockerfile").write_text(f"FROM {image}\nWORKDIR {WORKDIR}\n")
        (root / "tests" / "test.sh").write_text(test)
        (root / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{SOLVE}\n")
    return folder


def _config(image: str | None, verifier_timeout_s: float) -> str:
    metadata = '[metadata]\ntermrl_userland = "host"\n\n' if image is None else ""
    return f"""\
schema_version = "1.4"

{metadata}[environment]
docker_image = "{image or "debian:12-slim"}"
workdir = "{WORKDIR}"
network_mode = "no-network"
memory_mb = 256
storage_mb = 64

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = {verifier_timeout_s}
"""


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]), image=os.environ.get("TERMRL_UPSTREAM_IMAGE"))
