"""The processes of a launch: started, recorded by id in the run folder, and ended by that id, never by a name.

A record is a pid with the moment at which the process began, so that a pid that is used again is never mistaken. While
the launcher lives it adopts what its children leave behind. Should it be killed before it recorded one, that one is
still known by the run folder in its environment (:data:`OWNER`), which it inherited.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil

from termrl.runs.files import append_jsonl, read_jsonl

RECORDS = "processes.jsonl"
OWNER = "TERMRL_LAUNCH"
INTERRUPTED = 130

_LOOK_S = 0.2
_RECORD_S = 1.0
_END_LOOK_S = 0.05
_GRACE_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36
_TAIL = 64 * 1024


class Records:
    """What a run folder says that was started there."""

    def __init__(self, run: Path) -> None:
        self.path = run / RECORDS
        self._owner = str(run)
        self._known: set[tuple[int, int]] = set()

    def add(self, step: str, processes: Iterable[psutil.Process]) -> None:
        """Keep processes that are not kept yet."""
        here, new = _machine(), []
        for process in processes:
            began = _began(process.pid)
            if began is not None and (process.pid, began) not in self._known:
                self._known.add((process.pid, began))
                new.append({"kind": "process", "machine": here, "pid": process.pid, "began": began, "step": step})
        if new:
            append_jsonl(self.path, new)

    def add_job(self, step: str, job: str, address: str) -> None:
        """Keep a Ray job."""
        append_jsonl(self.path, [{"kind": "job", "id": job, "address": address, "step": step}])

    def alive(self) -> list[psutil.Process]:
        """The processes of this machine that were started for the run and still run; never this one."""
        here = _machine()
        recorded = {
            record["pid"]
            for record in read_jsonl(self.path)
            if record["kind"] == "process" and record["machine"] == here and _began(record["pid"]) == record["began"]
        }
        others = (process for process in psutil.process_iter() if process.pid != os.getpid() and _runs(process))
        return [process for process in others if process.pid in recorded or self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(OWNER) == self._owner
        except psutil.Error:
            return False

    def jobs(self) -> list[tuple[str, str]]:
        """(id, address) of the Ray jobs."""
        return [(record["id"], record["address"]) for record in read_jsonl(self.path) if record["kind"] == "job"]


def run_command(
    words: Sequence[str], *, step: str, cwd: str, env: Mapping[str, str], run: Path, out: BinaryIO | None = None
) -> int:
    """Run a command to its end, with its output in ``logs/STEP.log`` and on ``out``; returns its exit code.

    All that it started is ended when this returns or is interrupted, and recorded while it runs.

    Raises:
        OSError: it cannot be started.
    """
    records = Records(run)
    before = {process.pid for process in psutil.Process().children()}
    log = run / "logs" / f"{step}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with adopting_orphans(), log.open("ab") as written, log.open("rb") as shown:
        shown.seek(0, os.SEEK_END)
        # a session of its own: Ctrl-C in the terminal is this process's to handle
        child = subprocess.Popen(
            words,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
        try:
            recorded = 0.0
            while child.poll() is None:
                if time.monotonic() - recorded >= _RECORD_S:
                    records.add(step, below(before))
                    recorded = time.monotonic()
                _pass_on(shown, out)
                time.sleep(_LOOK_S)
            return child.returncode
        finally:
            records.add(step, below(before))
            try:
                end(lambda: below(before))
            except KeyboardInterrupt:
                end(lambda: below(before), grace_s=0.0)
                raise
            child.wait()
            _reap(below(before))
            _pass_on(shown, out)


def end(living: Callable[[], list[psutil.Process]], *, grace_s: float = _GRACE_S) -> int:
    """End processes: SIGTERM, and SIGKILL to what is left after ``grace_s``; returns how many there were.

    Args:
        living: says which are left; asked again, as they may start others while they end.
    """
    seen: set[int] = set()
    give_up = time.monotonic() + grace_s
    while processes := [process for process in living() if _runs(process)]:
        late = time.monotonic() >= give_up
        for process in processes:
            if late or process.pid not in seen:
                with contextlib.suppress(psutil.Error):
                    process.kill() if late else process.terminate()
            seen.add(process.pid)
        time.sleep(_END_LOOK_S)
    return len(seen)


def clean_up(run: Path, *, grace_s: float = _GRACE_S) -> int:
    """End what is left of a launch on this machine: recorded processes, and those that they started."""
    records = Records(run)
    known: dict[int, psutil.Process] = {}

    def living() -> list[psutil.Process]:
        for process in [*records.alive(), *known.values()]:
            known[process.pid] = process
            with contextlib.suppress(psutil.Error):
                known.update({child.pid: child for child in process.children(recursive=True)})
        return list(known.values())

    return end(living, grace_s=grace_s)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of what descendants leave behind, for as long as the context lasts."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a launch in order, as Ctrl-C does."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def below(before: Set[int] = frozenset()) -> list[psutil.Process]:
    """Every process below this one, but for the children that it had before and theirs."""
    found = []
    for child in psutil.Process().children():
        if child.pid not in before:
            found.append(child)
            with contextlib.suppress(psutil.Error):
                found.extend(child.children(recursive=True))
    return found


def _reap(adopted: Iterable[psutil.Process]) -> None:
    for process in adopted:
        with contextlib.suppress(OSError):
            os.waitpid(process.pid, os.WNOHANG)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _began(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's (``/proc/PID/stat``, field 22)."""
    try:
        # the name, in brackets, may hold spaces and brackets
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _pass_on(shown: BinaryIO, out: BinaryIO | None) -> None:
    target = sys.stdout.buffer if out is None else out
    while data := shown.read(_TAIL):
        target.write(data)
    target.flush()


def _machine() -> str:
    """This machine since its start: pids and moments of another say nothing here."""
    return f"{os.uname().nodename} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
