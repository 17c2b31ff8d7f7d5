"""The end of a process by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = """
import sys, time
from termrl.cli.interrupts import Interrupts
from termrl.sandboxes import sweep

def slow(*_, **__):
    time.sleep(0.5)
    print("swept", flush=True)

sweep.sweep = slow
with Interrupts("bye"):
    try:
        print("up", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(60)
"""


def test_signals_without_end_do_not_keep_it_from_removing_what_it_holds() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    give_up = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < give_up:
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    said, error = process.communicate(timeout=10)
    assert (process.returncode, said) == (130, "swept\n"), error
    assert error.count("ended at once; bye") == 1
