"""The system call filter of bubblewrap sandboxes: no command may change how the first process is bounded or scheduled.

In a sandbox everyone is the same user, and the kernel lets a user change the limits, the priority and the processors of
all their processes. A first process whose limits or turns were taken away would end or starve, and with it the
sandbox, before a verdict. The program is classic BPF on ``struct seccomp_data`` (seccomp(2)).
"""

from __future__ import annotations

import os
import platform
import struct
from dataclasses import dataclass
from typing import NamedTuple

from termrl.errors import SandboxStartError

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_FIRST = 1
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3
# System calls of x86-64's 32-bit-pointer variant are numbered from here, for the same architecture.
_X32 = 0x40000000


class _Machine(NamedTuple):
    """An architecture of <linux/audit.h> and its numbers of the system calls below."""

    architecture: int
    numbers: dict[str, int]


_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        {
            "prlimit64": 302,
            "sched_setaffinity": 203,
            "sched_setscheduler": 144,
            "sched_setparam": 142,
            "sched_setattr": 314,
            "setpriority": 141,
            "ioprio_set": 251,
        },
    ),
    "aarch64": _Machine(
        0xC00000B7,
        {
            "prlimit64": 261,
            "sched_setaffinity": 122,
            "sched_setscheduler": 119,
            "sched_setparam": 118,
            "sched_setattr": 274,
            "setpriority": 140,
            "ioprio_set": 30,
        },
    ),
}


@dataclass(frozen=True)
class _Rule:
    """``call`` is not permitted where its ``argument`` is ``value``, if argument ``pointer`` is given and not NULL."""

    call: str
    argument: int
    value: int
    pointer: int | None = None


_RULES = (
    _Rule("prlimit64", 0, _FIRST, pointer=2),
    _Rule("sched_setaffinity", 0, _FIRST),
    _Rule("sched_setscheduler", 0, _FIRST),
    _Rule("sched_setparam", 0, _FIRST),
    _Rule("sched_setattr", 0, _FIRST),
    _Rule("setpriority", 1, _FIRST),
    _Rule("setpriority", 0, _PRIO_USER),
    _Rule("ioprio_set", 1, _FIRST),
    _Rule("ioprio_set", 0, _IOPRIO_WHO_USER),
)


def program(machine: str) -> bytes:
    """The filter for a machine as ``uname -m`` names it: an array of ``struct sock_filter``, little-endian.

    A system call of another architecture (``int 0x80`` of a 64-bit program) ends its process.

    Raises:
        SandboxStartError: this machine's system calls are not known here.
    """
    known = _MACHINES.get(machine)
    if known is None:
        raise SandboxStartError(
            f"bubblewrap sandboxes do not know the system calls of {machine}",
            hint="use --sandbox docker, or a machine that is x86_64 or aarch64",
        )
    code = [_load(_ARCHITECTURE), _jump(_EQUAL, known.architecture, 1, 0), _end(_KILL_PROCESS)]
    code += [_load(_NUMBER), _jump(_AT_LEAST, _X32, 0, 1), _end(_ERRNO | _ENOSYS)]
    for rule in _RULES:
        code += _refusal(known.numbers[rule.call], rule)
    return b"".join([*code, _end(_ALLOW)])


def descriptor() -> int:
    """A new descriptor from which this machine's filter can be read, once.

    Raises:
        SandboxStartError: see :func:`program`.
    """
    code = program(platform.machine())
    fd = os.memfd_create("filter", os.MFD_CLOEXEC)
    os.write(fd, code)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _refusal(number: int, rule: _Rule) -> list[bytes]:
    """Instructions that refuse what ``rule`` says and go on to what follows them otherwise."""
    low = _ARGUMENTS + 8 * rule.argument
    given: list[bytes] = []
    if rule.pointer is not None:
        half = _ARGUMENTS + 8 * rule.pointer
        given = [_load(half), _jump(_EQUAL, 0, 0, 2), _load(half + 4), _jump(_EQUAL, 0, 1, 0)]
    refusal = [*given, _end(_ERRNO | _EPERM)]
    match = [_load(low), _jump(_EQUAL, rule.value, 0, len(refusal)), *refusal]
    return [_load(_NUMBER), _jump(_EQUAL, number, 0, len(match)), *match]


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", _LOAD, 0, 0, offset)


def _jump(how: int, value: int, if_so: int, if_not: int) -> bytes:
    return struct.pack("<HBBI", how, if_so, if_not, value)


def _end(action: int) -> bytes:
    return struct.pack("<HBBI", _RETURN, 0, 0, action)
