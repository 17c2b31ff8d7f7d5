"""The bounds of this backend in figures; that they hold is for the conformance suite to say."""

from __future__ import annotations

from termrl.sandboxes.base import Sandbox
from termrl.sandboxes.bubblewrap import BubblewrapProvider


async def test_open_files_and_core_dumps_are_bounded(sandbox: Sandbox) -> None:
    result = await sandbox.exec("ulimit -Hn; ulimit -Hc; ulimit -Hu", timeout_s=10)
    files, core, processes = result.output.split()
    assert int(files) <= 65536 and core == "0" and int(processes) == 64


async def test_the_provider_says_what_bounds_each_resource(provider: BubblewrapProvider) -> None:
    by_group = "cgroups" in provider.limits["memory"]
    assert set(provider.limits) >= {"memory", "processes", "files", "file count", "open files"}
    assert ("cpus" in provider.limits) is by_group
    assert by_group or "RLIMIT_DATA" in provider.limits["memory"]
