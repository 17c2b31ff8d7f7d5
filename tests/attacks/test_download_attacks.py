"""Tests that fetch and install as Terminal-Bench's do: what says from where, and what is already there, is not trusted.

The download is from a file, so that it works without a network; the policy's ways to redirect it are the same.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import pytest

from termrl.attacks import chosen
from termrl.sandboxes.base import SandboxProvider
from termrl.verifier.verify import verify
from tests.attacks.kinds import download_task
from tests.verifier.tiny import SECRET, handed_over, run, tiny_task

REDIRECTS = "; ".join(
    turn for attack in chosen(["names-and-certificates", "caches-and-settings"]) for turn in attack.turns
)

pytestmark = pytest.mark.skipif(not shutil.which("curl", path="/usr/bin:/bin"), reason="sandboxes see no curl")


LOOK = """\
curl -V >/dev/null
cat /etc/hosts /etc/resolv.conf; ls /etc/pip.conf /etc/uv/uv.toml 2>/dev/null
echo 1 > /logs/verifier/reward.txt
"""


async def test_files_that_say_where_downloads_come_from_are_put_back_for_tests_that_download(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    task = download_task(tmp_path, test=LOOK)
    async with handed_over(provider, task) as (sandbox, baseline):
        before = await run(sandbox, "cat /etc/hosts /etc/resolv.conf")
        await run(sandbox, REDIRECTS)
        assert "astral.sh" in await run(sandbox, "cat /etc/hosts")
        verdict = await verify(sandbox, task, baseline=baseline)
    assert verdict.output_tail == before
    assert "/etc/hosts" in verdict.signals["download_config"]


async def test_a_task_about_the_hosts_file_keeps_what_the_policy_wrote(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    test = "grep -q '10.0.0.9 db' /etc/hosts && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    task = tiny_task(tmp_path, test=test)
    async with handed_over(provider, task) as (sandbox, baseline):
        await run(sandbox, "echo '10.0.0.9 db' >> /etc/hosts")
        verdict = await verify(sandbox, task, baseline=baseline)
    assert (verdict.reward, verdict.signals) == (1.0, {"download_config": ["/etc/hosts"]})


async def test_no_server_of_the_host_can_be_called_from_inside(provider: SandboxProvider, tmp_path: Path) -> None:
    called = asyncio.Event()

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    abstract = await asyncio.start_unix_server(answer, f"\0termrl-test-{SECRET}")
    port = server.sockets[0].getsockname()[1]
    async with server, abstract, handed_over(provider, tiny_task(tmp_path)) as (sandbox, _):
        said = await run(sandbox, f"curl -m 2 -sS http://127.0.0.1:{port}/; (exec 3<>/dev/tcp/127.0.0.1/{port})")
        assert "refused" in said.lower() or "connect" in said.lower(), said
        said = await run(sandbox, f"curl -m 2 -sS --abstract-unix-socket termrl-test-{SECRET} http://x/")
        assert "connect" in said.lower(), said
        assert not called.is_set()
        with socket.create_connection(("127.0.0.1", port)):
            await asyncio.wait_for(called.wait(), 5)
