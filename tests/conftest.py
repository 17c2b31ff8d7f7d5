"""What holds for every test."""

from __future__ import annotations

import signal

# A suite that was started in the background has SIGINT ignored, and every process that it starts would inherit that:
# then no test of Ctrl-C could reach its program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
