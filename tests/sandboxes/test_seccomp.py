"""No command changes how the first process is bounded or scheduled, by whatever door of the kernel."""

from __future__ import annotations

import platform
import struct

import pytest

from termrl.errors import SandboxStartError
from termrl.sandboxes import seccomp
from termrl.sandboxes.base import ExecResult, Sandbox

X86 = platform.machine() == "x86_64"

# Says which calls succeed on the process whose number is given, each with its errno otherwise.
CALLS = """
import ctypes, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
pid = int(sys.argv[1])
limits, cpus, priority = (ctypes.c_uint64 * 2)(64, 64), ctypes.c_uint64(1), ctypes.c_int(0)
attributes = (ctypes.c_uint32 * 12)(48, 0)
numbers = {"x86_64": (302, 203, 144, 142, 314, 141, 251), "aarch64": (261, 122, 119, 118, 274, 140, 30)}
prlimit, affinity, scheduler, parameter, attribute, nice, io = numbers[platform.machine()]
calls = {
    "limits": (prlimit, pid, 7, limits, None),
    "affinity": (affinity, pid, 8, ctypes.byref(cpus)),
    "scheduler": (scheduler, pid, 5, ctypes.byref(priority)),
    "parameter": (parameter, pid, ctypes.byref(priority)),
    "attributes": (attribute, pid, attributes, 0),
    "nice": (nice, 0, pid, 19),
    "group": (nice, 1, pid, 19),
    "everyone": (nice, 2, 0, 19),
    "io": (io, 1, pid, 3 << 13),
    "everyone's io": (io, 3, 0, 3 << 13),
}
for name in sys.argv[2:] or calls:
    ctypes.set_errno(0)
    failed = libc.syscall(*calls[name]) != 0
    print(f"{name}: {ctypes.get_errno() if failed else 'done'}")
"""

# prlimit64 is 340 for 32-bit programs; a 64-bit one asks by int 0x80. rdi holds an address below 4 GiB.
INT_80 = """
import ctypes, mmap
low = ctypes.CDLL(None).mmap
low.restype = ctypes.c_void_p
low.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
page = low(None, 4096, 7, 0x62, -1, 0)  # private, anonymous, in the first 2 GiB
assert page < 1 << 32
code = bytes.fromhex("53" "b854010000" "bb01000000" "b900000000" "89fa" "31f6" "cd80" "5b" "c3")
ctypes.memmove(page, code, len(code))
print(ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(page)(page + 2048), flush=True)
"""

X32 = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(0x40000000 + 302, 1, 0, (ctypes.c_uint64 * 2)(), None)
print(ctypes.get_errno())
"""


async def python(sandbox: Sandbox, code: str, *arguments: str) -> ExecResult:
    await sandbox.put_bytes(code.encode(), "/tmp/code.py")
    return await sandbox.exec(f"python3 /tmp/code.py {' '.join(arguments)}", timeout_s=20)


async def test_nothing_about_the_first_process_can_be_changed(sandbox: Sandbox) -> None:
    found = (await python(sandbox, CALLS, "1")).output
    assert found.count(": 1\n") == 10 and len(found.splitlines()) == 10, found
    assert (await sandbox.exec("ps -o ni= -p 1 | xargs", timeout_s=10)).output == "0\n"


async def test_a_command_still_bounds_and_schedules_itself(sandbox: Sandbox) -> None:
    found = (await python(sandbox, CALLS, "0", "limits affinity nice scheduler io")).output
    assert found == "limits: done\naffinity: done\nnice: done\nscheduler: done\nio: done\n"
    told = await sandbox.exec("sleep 60 & prlimit --pid $! --nofile=32 && renice -n 5 -p $! >/dev/null", timeout_s=10)
    assert (told.output, told.exit_code) == ("", 0)
    assert (await sandbox.exec("prlimit --pid 1 --nofile --noheadings", timeout_s=10)).exit_code == 0


@pytest.mark.skipif(not X86, reason="int 0x80 and x32 are doors of x86-64")
async def test_the_32_bit_doors_are_closed_too(sandbox: Sandbox) -> None:
    result = await python(sandbox, INT_80)
    # SIGSYS; SIGSEGV from a kernel that has no 32-bit system calls at all.
    assert result.exit_code in (128 + 31, 128 + 11), result
    assert (await python(sandbox, X32)).output == "38\n"
    assert (await sandbox.exec("echo alive", timeout_s=10)).output == "alive\n"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_jumps_forward_only_and_ends(machine: str) -> None:
    code = seccomp.program(machine)
    steps = [struct.unpack_from("<HBBI", code, at) for at in range(0, len(code), 8)]
    for place, (kind, if_so, if_not, _) in enumerate(steps):
        if kind & 7 == 5:
            assert place + 1 + max(if_so, if_not) < len(steps)
    assert steps[-1] == (6, 0, 0, 0x7FFF0000)


def test_a_machine_whose_system_calls_are_not_known_is_refused() -> None:
    with pytest.raises(SandboxStartError, match="riscv64"):
        seccomp.program("riscv64")
