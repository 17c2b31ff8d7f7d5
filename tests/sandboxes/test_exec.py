"""What holds of this backend's commands beyond the conformance suite, with cgroups and without."""

from __future__ import annotations

import asyncio

import pytest

from termrl.errors import SandboxLostError
from termrl.sandboxes.base import Sandbox
from termrl.sandboxes.bubblewrap import BubblewrapProvider


async def test_the_environment_is_non_interactive_and_holds_nothing_of_the_host(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    names = dict(
        line.split("=", 1) for line in (await sandbox.exec("env", timeout_s=10)).output.splitlines() if "=" in line
    )
    assert names["PAGER"] == names["GIT_PAGER"] == "cat"
    assert names["TERM"] == "dumb"
    assert names["HOME"] == "/root"
    assert names["PATH"].split(":")[0] == "/usr/local/sbin"
    assert set(names) <= {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PAGER", "GIT_PAGER", "DEBIAN_FRONTEND"),
        *("PWD", "SHLVL", "_"),
    }


async def test_a_sandbox_whose_first_process_is_killed_from_outside_is_lost(
    sandbox: Sandbox, provider: BubblewrapProvider
) -> None:
    waiting = asyncio.create_task(sandbox.exec("sleep 100", timeout_s=100))
    await asyncio.sleep(0.2)
    provider.kill(sandbox.id)
    with pytest.raises(SandboxLostError, match="sample"):
        await asyncio.wait_for(waiting, 5)
    await sandbox.stop()
    assert provider.live == 0
