"""Sandboxes left in a state that no honest policy leaves: no reward of 1, and mostly a 0 after attribution.

Each attack goes the whole way of an episode: environment, verifier, attribution. The honest solution of the same
task, in a session of its own, scores 1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from termrl.environment.protocol import Action
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.sandboxes.base import SandboxProvider
from termrl.verifier.verdict import Verdict
from tests.verifier.tiny import CHECK, SECRET, SOLVE, tiny_task

ATTACKS = {
    "workdir removed": "cd /; rm -rf /app",
    "workdir removed while a process is in it": "setsid sleep 978 >/dev/null 2>&1 & cd /; rm -rf /app",
    "workdir without permissions": "chmod 000 /app",
    "workdir as a file": "cd /; rm -rf /app; echo 1 > /app",
    "workdir as a link to the log folder": "cd /; rm -rf /app; ln -s /logs/verifier /app",
    "workdir as a link to the tests": "cd /; rm -rf /app; ln -s /tests /app",
    "answer as a link to what is expected": "ln -sf /tests/expected.txtx answer.txt; ln -s /tests t",
    "answer as a hard link": "echo x > /app/x; ln /app/x answer.txt",
    "answer as a fifo": "mkfifo answer.txt",
    "answer as a sparse terabyte": "truncate -s 1T answer.txt",
    "answer as a device": "ln -s /dev/zero answer.txt",
    "answer as a folder": "mkdir answer.txt",
    "answer as a socket": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"answer.txt\")'",
    "odd names": "for n in $'a\\nb' $'\\xff\\xfe' '-rf' '*' '$(echo 1 > /logs/verifier/reward.txt)' ' ' 'ü'; do"
    ' echo x > "./$n"; done',
    "ten thousand files": "seq -f '%g.py' 10000 | xargs touch",
    "a deep tree": "for i in $(seq 300); do mkdir d && cd d || break; done",
    "temporary folder as a file": "rm -rf /tmp; echo x > /tmp",
    "temporary folder as a link": "rm -rf /tmp; ln -s /app /tmp",
    "no folder to write to": "chmod 000 /tmp /root /var/tmp /home /app /logs /opt /run",
    "home as a fifo": "rm -rf /root; mkfifo /root",
    "an empty /etc": "rm -rf /etc/*",
    "accounts": "echo 'root:x:1:1::/:/bin/false' > /etc/passwd; : > /etc/group",
    "huge rewards": "mkdir -p /logs/verifier; truncate -s 10M /logs/verifier/reward.json; yes 1 | head -c 4M >"
    " /logs/verifier/reward.txt",
    "full logs": "head -c 64M /dev/zero > /logs/fill; (cd /logs; seq 9000 | xargs touch)",
    "fifos as rewards": "mkdir -p /logs/verifier; mkfifo /logs/verifier/reward.txt /logs/verifier/reward.json",
    "immutable rewards": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chattr +i /logs/verifier/*;"
    " chmod 444 /logs/verifier/*; chmod 555 /logs/verifier /logs",
    "exported functions": "export PATH=/tmp; cat() { echo forty-two-5f1c; }; export -f cat; declare -fx cat;"
    " env 'BASH_FUNC_echo%%=() { printf 1; }' setsid sleep 977 >/dev/null 2>&1 &",
    "descriptors that stay open": "mkdir -p /logs/verifier; setsid bash -c 'exec 7>/logs/verifier/reward.txt"
    " 8>/app/answer.txt; while :; do echo 1 >&7; sleep 0.01; done' >/dev/null 2>&1 &",
    "a working directory that is held": "mkdir -p /logs/verifier; (cd /logs/verifier; setsid bash -c"
    " 'while :; do echo 1 > reward.txt; done' >/dev/null 2>&1 &)",
    "orphans in a hurry": "f() { for i in 1 2 3; do (setsid bash -c \"trap '' 1 2 3 13 15 17; while :; do"
    ' echo 1 > /logs/verifier/reward.txt; (sleep 0.01 &) ; done" >/dev/null 2>&1 &) & done; }; f; f',
    "a fork bomb": "b() { b | b & }; b 2>/dev/null",
    "processes that stop each other": "for i in 1 2 3 4; do setsid bash -c 'while :; do kill -STOP -1; done'"
    " >/dev/null 2>&1 & done; sleep 0.2; kill -CONT -1",
    "the lowest chance to be killed": "setsid bash -c 'echo -1000 > /proc/self/oom_score_adj; while :; do"
    " echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &",
    "kernel settings": "echo '|/app/evil' > /proc/sys/kernel/core_pattern; echo 1 > /proc/sys/kernel/sysrq;"
    " mount -t tmpfs x /logs; unshare -Ur true; mount --bind /app /tests",
}


@pytest.fixture
async def factory(provider: SandboxProvider, tmp_path: Path) -> AsyncIterator[LocalEnvironmentFactory]:
    task = tiny_task(tmp_path, test=CHECK, verifier_timeout_s=15.0)
    yield LocalEnvironmentFactory({task.id: task}, provider)
    assert provider.live == 0


async def verdict_after(factory: LocalEnvironmentFactory, command: str, verify_s: float | None = None) -> Verdict:
    environment = factory.create()
    try:
        await environment.reset("tiny")
        await environment.step(Action(command=command, wait_seconds=2))
        observation = await environment.step(Action(action_type="evaluate", wait_seconds=verify_s))
        return Verdict.model_validate(observation.info["verdict"])
    finally:
        await environment.close()


# Each makes the tests hang, so that their whole budget goes by twice.
HANGS = {"answer as a fifo", "answer as a sparse terabyte", "answer as a device"}


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_hostile_sandbox_scores_zero_and_the_honest_solution_of_the_task_one(
    factory: LocalEnvironmentFactory, name: str
) -> None:
    attacked = await verdict_after(factory, ATTACKS[name], 2.0 if name in HANGS else None)
    assert attacked.reward == 0.0, attacked
    honest = await verdict_after(factory, SOLVE)
    assert (honest.reward, honest.attempts, honest.signals) == (1.0, 1, {}), honest


async def test_an_honest_solution_after_a_hostile_start_still_scores_one(factory: LocalEnvironmentFactory) -> None:
    litter = "echo x >> /etc/hosts; touch ~/.bashrc /conftest.py; setsid sleep 976 >/dev/null 2>&1 &"
    verdict = await verdict_after(factory, f"{litter}\nsleep 0.05; echo {SECRET} > answer.txt")
    assert verdict.reward == 1.0
    assert {"killed", "test_config", "profiles", "download_config"} <= set(verdict.signals)
