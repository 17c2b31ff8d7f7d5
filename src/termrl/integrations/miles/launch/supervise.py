"""Run a command of a Ray job so that nothing below it outlives it: ``python -m … command``.

Ray ends what it can see from a job's process; daemons that left their session would stay. They are adopted here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from termrl.integrations.miles.launch.process import INTERRUPTED, adopting_orphans, below, end, ending_on_signals

_GRACE_S = 1.5  # Ray kills a job that is stopped after 3 s


def main(words: Sequence[str]) -> int:
    """Run it; returns its exit code."""
    with adopting_orphans(), ending_on_signals():
        child = subprocess.Popen(words)
        try:
            code = child.wait()
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            end(below, grace_s=_GRACE_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
