"""What a sandbox's first process does for itself, so that no command can look into it or end it."""

import _signal  # pyright: ignore[reportMissingImports]
import os
import sys


def not_dumpable() -> None:
    """Make sure that no other process can look into this one, also where the execute-only program did not."""
    try:
        os.close(os.open("/proc/self/environ", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return
    import ctypes

    pr_set_dumpable = 4
    if ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0) != 0:
        sys.exit("cannot make the first process undumpable")


def ignore_signals() -> None:
    """Ignore every signal that can be ignored, but for the ends of children."""
    for number in range(1, 65):
        if number not in (_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD, 32, 33):
            _signal.signal(number, _signal.SIG_IGN)
