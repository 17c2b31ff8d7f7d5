"""Tests that fetch and install as Terminal-Bench's do: what says from where, and what is already there, is not trusted.

The download is from a file, so that it works without a network; the policy's ways to redirect it are the same.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import pytest

from termrl.sandboxes.base import SandboxProvider
from termrl.tasks.task import Task
from termrl.verifier.oracle import run_solution
from termrl.verifier.verify import verify
from tests.verifier.tiny import CHECK, SECRET, handed_over, run, tiny_task

TEST_SH = """\
#!/bin/bash
curl -LsSf file:///tests/install.sh | sh
source "$HOME/.local/bin/env"
uvx check
"""

INSTALL_SH = """\
mkdir -p "$HOME/.local/bin"
echo 'export PATH="$HOME/.local/bin:$PATH"' > "$HOME/.local/bin/env"
cp /tests/check.sh "$HOME/.local/bin/uvx"; chmod +x "$HOME/.local/bin/uvx"
"""

FORGE = "#!/bin/bash\\necho 1 > /logs/verifier/reward.txt; echo forged; exit 0\\n"
ATTACKS = {
    "curlrc": f"printf '{FORGE}' > /tmp/evil.sh; for d in ~ ~/.config; do mkdir -p $d; printf 'url = "
    '"file:///tmp/evil.sh"\\nnext\\n\' | tee $d/.curlrc $d/curlrc > /dev/null; done',
    "planted installation": "mkdir -p ~/.local/bin; for n in env uv uvx curl; do"
    f" printf '{FORGE}' > ~/.local/bin/$n; chmod +x ~/.local/bin/$n; done",
    "caches and settings": "for f in ~/.cache/uv/x ~/.config/uv/uv.toml ~/.config/pip/pip.conf ~/.netrc ~/.wgetrc"
    " /etc/pip.conf /etc/uv/uv.toml /etc/gitconfig; do mkdir -p ${f%/*};"
    " echo 'index-url = http://127.0.0.1/' > $f; done",
    "names and certificates": "echo '127.0.0.1 astral.sh pypi.org' >> /etc/hosts; echo 'nameserver 127.0.0.1' >"
    " /etc/resolv.conf; echo 'hosts: x' > /etc/nsswitch.conf; echo x > /etc/ssl/certs/ca-certificates.crt",
}

pytestmark = pytest.mark.skipif(not shutil.which("curl", path="/usr/bin:/bin"), reason="sandboxes see no curl")


def download_task(folder: Path, **fields: str) -> Task:
    task = tiny_task(folder, test=fields.get("test", TEST_SH))
    (task.tests / "install.sh").write_text(INSTALL_SH)
    (task.tests / "check.sh").write_text(CHECK)
    return task


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
async def test_no_attack_on_a_download_scores_one_and_the_honest_solution_does(
    provider: SandboxProvider, tmp_path: Path, attack: str
) -> None:
    task = download_task(tmp_path)
    async with handed_over(provider, task) as (sandbox, baseline):
        await run(sandbox, attack)
        attacked = await verify(sandbox, task, baseline=baseline)
        assert attacked.reward == 0.0 and "forged" not in attacked.output_tail, attacked
        assert {"download_config", "test_tools"} & set(attacked.signals), attacked.signals
        await run(sandbox, attack)
        await run_solution(sandbox, task)
        honest = await verify(sandbox, task, baseline=baseline)
        assert honest.reward == 1.0, honest


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
        await run(sandbox, ATTACKS["names and certificates"] + "; " + ATTACKS["caches and settings"])
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
