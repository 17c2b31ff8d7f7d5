"""Nothing outlives its owner: real processes, really killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from termrl.errors import SandboxStartError
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider
from termrl.sandboxes.cgroups import find_roots
from termrl.sandboxes.host import state_folder
from termrl.sandboxes.sweep import Owner, processes_of, remains, sweep

SOURCE = Path(__file__).parents[2] / "src"
OWNER = """
import asyncio, sys
from pathlib import Path
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider

async def main():
    provider = BubblewrapProvider(state=Path(sys.argv[1]))
    sandboxes = await asyncio.gather(*(provider.create(SandboxSpec("t", host_userland=True)) for _ in range(20)))
    for box in sandboxes:
        await box.exec(f"for i in 1 2; do setsid sleep {sys.argv[2]} >/dev/null 2>&1 & done", timeout_s=20)
    print("up", provider.live, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def sleepers(seconds: str) -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes() == b"sleep\0" + seconds.encode() + b"\0"
        except OSError:
            continue
    return count


def groups_of(owner: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").rglob(f"termrl-{owner}"))


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def killed_owner(state: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state), "777.25"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up 20\n"
    yield process
    process.kill()
    process.wait()


def test_sigkill_of_an_owner_with_20_sandboxes_and_40_daemons_leaves_nothing_after_a_sweep(
    killed_owner: subprocess.Popen[str], state: Path
) -> None:
    (folder,) = [each for each in (state / "owners").iterdir() if each.name.startswith(f"{killed_owner.pid}-")]
    assert wait_until(lambda: sleepers("777.25") == 40)
    assert len([each for each in folder.iterdir() if each.is_dir()]) == 20
    alive = sweep(state)
    assert alive.live_owners == 1 and alive.processes == alive.folders == 0
    assert sleepers("777.25") == 40

    killed_owner.send_signal(signal.SIGKILL)
    killed_owner.wait()
    swept = sweep(state)
    assert (swept.owners, swept.folders, swept.live_owners) == (1, 21, 0)
    if find_roots() is not None:
        assert swept.cgroups >= 21
    assert wait_until(lambda: sleepers("777.25") == 0)
    assert processes_of(folder) == []
    assert not folder.exists() and groups_of(folder.name) == []
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert sweep(state).owners == 0


def test_a_lock_that_a_forked_child_inherited_does_not_keep_a_dead_owner_alive(state: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from termrl.sandboxes.sweep import Owner\n"
        "Owner(Path(sys.argv[1])); child = os.fork()\n"
        "time.sleep(600) if child == 0 else (print(child, flush=True), time.sleep(600))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(state)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert sweep(state).live_owners == 1
        process.kill()
        process.wait()
        assert sweep(state).owners == 1
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_state_folder_made_anew_disowns_what_one_with_its_inode_left(state: Path) -> None:
    owner = Owner(state)
    try:
        seal = state / "seal"
        kept, first = seal.read_bytes(), owner.name.split("-")[1]
        seal.unlink()  # all that differs where a file system gives a number again
        again = Owner(state)
        again.release()
        assert again.name.split("-")[1] != first
        seal.write_bytes(kept)
    finally:
        owner.release()


def test_owners_that_come_at_once_agree_on_the_state_folder(state: Path) -> None:
    (state / "seal").unlink(missing_ok=True)
    with ThreadPoolExecutor(16) as threads:
        owners = list(threads.map(lambda _: Owner(state), range(16)))
    for owner in owners:
        owner.release()
    assert len({owner.name.split("-")[1] for owner in owners}) == 1
    assert not list(state.glob(".seal-*"))


def test_an_owner_of_an_earlier_boot_is_swept_and_a_half_made_claim_is_left_alone(state: Path) -> None:
    owner = Owner(state)
    facts = json.loads((owner.folder / "owner").read_text())
    old = state / "owners" / "1-old"
    old.mkdir()
    (old / "owner").write_text(json.dumps({**facts, "boot": "another"}))
    claiming = state / "owners" / ".new-2-now"
    claiming.mkdir()
    swept = sweep(state)
    assert (swept.owners, swept.live_owners) == (1, 1)
    assert owner.folder.exists() and claiming.exists() and not old.exists()
    owner.release()
    claiming.rmdir()


async def test_stop_and_close_leave_nothing(state: Path) -> None:
    provider = BubblewrapProvider(state=state)
    spec = SandboxSpec("t", host_userland=True)
    one, two = await provider.create(spec), await provider.create(spec)
    (folder,) = [each for each in (state / "owners").iterdir() if each.name.startswith(f"{os.getpid()}-")]
    await one.exec("setsid sleep 778.5 >/dev/null 2>&1 &", timeout_s=10)
    assert provider.live == 2
    assert wait_until(lambda: sleepers("778.5") == 1)
    await one.stop()
    assert provider.live == 1
    assert wait_until(lambda: sleepers("778.5") == 0)
    assert processes_of(folder)
    await two.exec("setsid sleep 778.5 >/dev/null 2>&1 &", timeout_s=10)
    await provider.close()
    assert provider.live == 0 and not folder.exists() and groups_of(folder.name) == []
    assert wait_until(lambda: sleepers("778.5") == 0 and not processes_of(folder))


async def test_killing_the_launcher_loses_its_sandboxes_and_the_next_create_works(state: Path) -> None:
    async with BubblewrapProvider(state=state) as provider:
        spec = SandboxSpec("t", host_userland=True)
        lost = await provider.create(spec)
        await lost.exec("setsid sleep 779.5 >/dev/null 2>&1 &", timeout_s=10)
        assert provider._launcher is not None
        os.kill(provider._launcher.pid, signal.SIGKILL)
        assert wait_until(lambda: sleepers("779.5") == 0)
        fresh = await provider.create(spec)
        assert (await fresh.exec("echo new", timeout_s=10)).output == "new\n"
        await lost.stop()
        assert provider.live == 1


async def test_a_failing_start_leaves_nothing_and_says_why(state: Path) -> None:
    async with BubblewrapProvider(state=state) as provider:
        with pytest.raises(SandboxStartError, match=r"odd: the sandbox did not start: /usr/not: Read-only"):
            await provider.create(SandboxSpec("odd", host_userland=True, workdir="/usr/not/writable"))
        provider._empty = state / "missing"
        with pytest.raises(SandboxStartError, match=r"bwrap: .*missing"):
            await provider.create(SandboxSpec("odd", host_userland=True))
        assert provider.live == 0
        (folder,) = [each for each in (state / "owners").iterdir() if each.name.startswith(f"{os.getpid()}-")]
        assert [each for each in folder.iterdir() if each.is_dir()] == []


def test_a_state_folder_that_others_can_write_or_not_reach_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(SandboxStartError, match="only you can write to"):
        state_folder(shared)
    if os.geteuid() == 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        with pytest.raises(SandboxStartError, match="closed to other users"):
            state_folder(closed / "state")


def test_the_staged_runtime_is_executable_but_not_readable_where_it_is_executed(state: Path) -> None:
    staged = list((state / "runtime").glob("*/stage.json"))
    assert staged
    for facts in staged:
        command = json.loads(facts.read_text())["command"]
        executed = facts.parent / Path(command[0]).relative_to("/.termrl")
        assert stat.S_IMODE(executed.stat().st_mode) == 0o711


def test_what_an_owner_left_is_found_and_swept_even_when_its_folder_is_gone(
    state: Path, killed_owner: subprocess.Popen[str]
) -> None:
    (folder,) = [each for each in (state / "owners").iterdir() if each.name.startswith(f"{killed_owner.pid}-")]
    launcher = next(pid for pid in processes_of(folder) if "launcher" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(launcher, signal.SIGSTOP)
    killed_owner.kill()
    killed_owner.wait()
    (state / "owners" / folder.name).rename(state / "elsewhere")
    assert any(line == f"process {launcher}" for line in remains(state))
    swept = sweep(state)
    assert swept.owners == 1 and swept.processes >= 1
    assert remains(state) == []
    assert wait_until(lambda: sleepers("777.25") == 0)
    shutil.rmtree(state / "elsewhere")
