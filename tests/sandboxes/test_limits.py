"""The bounds of this backend in figures; that they hold is for the conformance suite to say."""

from __future__ import annotations

import os
from pathlib import Path

from termrl.sandboxes.base import Sandbox
from termrl.sandboxes.bubblewrap import BubblewrapProvider
from termrl.sandboxes.staged.bounds import Victims


async def test_open_files_and_core_dumps_are_bounded(sandbox: Sandbox) -> None:
    result = await sandbox.exec("ulimit -Hn; ulimit -Hc; ulimit -Hu", timeout_s=10)
    files, core, processes = result.output.split()
    assert int(files) <= 65536 and core == "0" and int(processes) == 64


async def test_the_provider_says_what_bounds_each_resource(provider: BubblewrapProvider) -> None:
    by_group = "cgroups" in provider.limits["memory"]
    assert set(provider.limits) >= {"memory", "processes", "files", "file count", "open files"}
    assert ("cpus" in provider.limits) is by_group
    assert by_group or "RLIMIT_DATA" in provider.limits["memory"]


def test_a_child_goes_on_only_when_its_parent_is_no_longer_as_likely_to_be_killed(tmp_path: Path) -> None:
    """Else a command could fill the memory while the first process stands beside it in the kernel's eyes."""
    standing = tmp_path / "oom_score_adj"
    standing.write_text("300\n")
    victims = Victims(os.open(standing, os.O_RDWR))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(200):
        pid = victims.fork()
        if pid == 0:
            os._exit(standing.read_text()[:3] != "300")
        assert os.waitpid(pid, 0)[1] == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
