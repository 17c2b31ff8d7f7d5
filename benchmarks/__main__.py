"""Run every benchmark, one after the other: ``python -m benchmarks [--json]``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    scripts = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("_"))
    sys.exit(max(subprocess.run([sys.executable, script, *sys.argv[1:]]).returncode for script in scripts))
