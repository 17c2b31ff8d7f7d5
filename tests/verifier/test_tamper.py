"""Tamper signals, what the rules do on them, and the clean room, on real sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from termrl.config import TrainConfig
from termrl.environment.protocol import Action
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.sandboxes.base import SandboxProvider
from termrl.tasks.task import Task
from termrl.verifier.causes import Cause
from termrl.verifier.metrics import verdict_metrics
from termrl.verifier.rules import DEFAULT_RECHECK_ON, VerifyRules
from termrl.verifier.signals import Signal, signal_of
from termrl.verifier.verdict import Outcome, Verdict
from termrl.verifier.verify import verify
from tests.verifier.tiny import SECRET, handed_over, run, tiny_task

SOLVE = f"echo {SECRET} > answer.txt"
PLANT = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
EVERY = frozenset(Signal)


async def scored(provider: SandboxProvider, task: Task, command: str, rules: VerifyRules | None = None) -> Verdict:
    environment = LocalEnvironmentFactory({task.id: task}, provider, rules=rules or VerifyRules()).create()
    try:
        await environment.reset(task.id)
        await environment.step(Action(command=f"sleep 0.02; {command}"))
        return Verdict.model_validate((await environment.step(Action(action_type="evaluate"))).info["verdict"])
    finally:
        await environment.close()
        assert provider.live == 0


@pytest.mark.parametrize(
    ("command", "signal", "evidence"),
    [
        (PLANT, Signal.PLANTED_REWARD, ["/logs/verifier/reward.txt"]),
        ("echo x >> /etc/passwd", Signal.SYSTEM_FILES, ["/etc/passwd"]),
        ("rm /etc/shells", Signal.SYSTEM_FILES, ["/etc"]),
        ("mv /etc/group /etc/group2; mv /etc/group2 /etc/group", Signal.SYSTEM_FILES, ["/etc/group"]),
        ("touch -d 2001-01-01 /etc/services", Signal.SYSTEM_FILES, ["/etc/services"]),
        ("chmod 600 /etc/profile", Signal.PROFILES, ["/etc/profile"]),
        ("echo x > ~/.bashrc", Signal.PROFILES, ["/root/.bashrc"]),
        ("mkdir -p ~/.config/uv; echo > ~/.config/uv/uv.toml", Signal.DOWNLOAD_CONFIG, ["/root/.config/uv/uv.toml"]),
        ("echo x > /etc/resolv.conf", Signal.DOWNLOAD_CONFIG, ["/etc/resolv.conf"]),
        ("mkdir -p ~/.local/bin; touch ~/.local/bin/uvx", Signal.TEST_TOOLS, ["/root/.local/bin/uvx"]),
        ("touch json.py", Signal.TEST_TOOLS, ["/app/json.py"]),
        ("touch /conftest.py", Signal.TEST_CONFIG, ["/conftest.py"]),
        ("touch sitecustomize.py", Signal.TEST_CONFIG, ["/app/sitecustomize.py"]),
        ("setsid sleep 975 >/dev/null 2>&1 &", Signal.KILLED, {"count": 1, "names": ["sleep"]}),
    ],
)
async def test_what_a_policy_leaves_is_a_signal_with_its_evidence(
    provider: SandboxProvider, tmp_path: Path, command: str, signal: Signal, evidence: object
) -> None:
    task = tiny_task(tmp_path)
    async with handed_over(provider, task) as (sandbox, baseline):
        await run(sandbox, f"{command}\nsleep 0.05")
        verdict = await verify(sandbox, task, baseline=baseline)
    assert verdict.signals == {str(signal): evidence}
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


async def test_a_listener_is_named_by_its_address(provider: SandboxProvider, tmp_path: Path) -> None:
    serve = "import socket,time\ns=socket.create_server(('127.0.0.1', 8123))\ntime.sleep(60)"
    task = tiny_task(tmp_path)
    async with handed_over(provider, task) as (sandbox, baseline):
        if (await sandbox.exec("python3 -c ''", timeout_s=5)).exit_code != 0:
            pytest.skip("sandboxes see no python3 to listen with")
        await run(sandbox, f'setsid python3 -c "{serve}" >/dev/null 2>&1 & sleep 0.5')
        verdict = await verify(sandbox, task, baseline=baseline)
    assert verdict.signals["listeners"] == ["127.0.0.1:8123"]


async def test_honest_work_gives_no_signal(provider: SandboxProvider, tmp_path: Path) -> None:
    work = "mkdir -p src ~/notes; seq 2000 | xargs touch; touch conftest.py setup.py .bashrc; echo x > /tmp/x; ls"
    verdict = await scored(provider, tiny_task(tmp_path), f"{work}; {SOLVE}")
    assert (verdict.reward, verdict.signals) == (1.0, {})


async def test_a_flood_of_changes_hides_nothing(provider: SandboxProvider, tmp_path: Path) -> None:
    flood = "touch /etc/gshadow; cd /etc; seq -f 'a-long-name-%g' 4000 | xargs touch; touch /conftest.py /root/.bashrc"
    verdict = await scored(provider, tiny_task(tmp_path), flood)
    assert {"system_files", "test_config", "profiles"} == set(verdict.signals) and verdict.reward == 0.0


@pytest.mark.parametrize(
    "link",
    [
        "ln -s /tests/expected.txt answer.txt",
        "ln -s ../tests/expected.txt answer.txt",
        "ln -s /tests /var/tmp/t; ln -s /var/tmp/t/expected.txt answer.txt",
        "ln -s /proc/self/root/tests/expected.txt answer.txt",
        "mkdir d; ln -s /app/d/../../tests d/e; ln -s d/e/expected.txt answer.txt",
    ],
)
async def test_a_link_to_what_the_tests_expect_is_gone_before_they_run(
    provider: SandboxProvider, tmp_path: Path, link: str
) -> None:
    honest = "mkdir tests; echo x > tests/x; ln -s tests/x kept"
    verdict = await scored(provider, tiny_task(tmp_path), f"{honest}; {link}")
    assert verdict.reward == 0.0 and verdict.signals["links_to_tests"], verdict
    assert all("kept" not in path for path in verdict.signals["links_to_tests"])


async def test_a_changed_folder_of_path_comes_last(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, spec={"env": {"PATH": "/opt/tools/bin:/usr/bin:/bin"}})
    shim = "mkdir -p /opt/tools/bin; printf '#!/bin/bash\\necho same' > /opt/tools/bin/cat; chmod +x /opt/tools/bin/cat"
    async with handed_over(provider, task) as (sandbox, baseline):
        await run(sandbox, shim)
        assert (await verify(sandbox, task)).reward == 1.0, "the shim would win"
        verdict = await verify(sandbox, task, baseline=baseline)
    assert verdict.reward == 0.0
    assert verdict.signals["test_tools"] == ["/opt/tools/bin/cat"]


async def test_a_program_that_the_tests_run_cannot_write_a_reward_file_of_its_own_kind(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    test = "bash ./program.sh; echo 0 > /logs/verifier/reward.txt"
    verdict = await scored(
        provider,
        tiny_task(tmp_path, test=test),
        "echo 'echo {\\\"reward\\\":1} > /logs/verifier/reward.json' > program.sh",
    )
    assert (verdict.reward, verdict.signals) == (0.0, {"foreign_reward": 1.0})


async def test_processes_that_the_tests_leave_are_counted(provider: SandboxProvider, tmp_path: Path) -> None:
    test = "setsid sleep 974 & echo 1 > /logs/verifier/reward.txt"
    assert (await scored(provider, tiny_task(tmp_path, test=test), "true")).signals == {"left_by_tests": 1}


# --- rules --------------------------------------------------------------------------------------------------------


async def test_signals_change_nothing_unless_they_are_listed(provider: SandboxProvider, tmp_path: Path) -> None:
    loud = f"echo x >> /etc/hosts; touch ~/.bashrc; setsid sleep 973 >/dev/null 2>&1 & {SOLVE}"
    verdict = await scored(provider, tiny_task(tmp_path), loud)
    assert (verdict.reward, verdict.attempts, verdict.clean_room) == (1.0, 1, None)


async def test_a_listed_signal_zeroes_a_pass_and_says_why(provider: SandboxProvider, tmp_path: Path) -> None:
    rules = VerifyRules(zero_on=frozenset({Signal.PROFILES}))
    task = tiny_task(tmp_path)
    verdict = await scored(provider, task, f"touch ~/.bashrc; {SOLVE}", rules)
    assert (verdict.reward, verdict.cause) == (0.0, Cause.BROKE_VERIFIER)
    assert "profiles" in verdict.detail and verdict.signals == {"profiles": ["/root/.bashrc"]}
    assert (await scored(provider, task, SOLVE, rules)).reward == 1.0


async def test_a_pass_that_rests_on_more_than_the_workdir_falls_in_the_clean_room(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    test = '[ "$(cat /var/tmp/a)" = yes ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt'
    verdict = await scored(provider, tiny_task(tmp_path, test=test), f"{PLANT}; echo yes > /var/tmp/a")
    assert (verdict.reward, verdict.cause, verdict.attempts) == (0.0, Cause.TESTS_FAILED, 2)
    assert verdict.clean_room is not None and verdict.clean_room.outcome is Outcome.FAILED
    assert verdict.clean_room.signals == ("planted_reward",) and "planted_reward" in verdict.signals


async def test_a_pass_by_the_workdir_alone_stands_in_the_clean_room(provider: SandboxProvider, tmp_path: Path) -> None:
    test = "[ -e note.txt ] && exit 1; . ./sub/run.sh; echo $r > /logs/verifier/reward.txt"
    task = tiny_task(tmp_path, test=test, files={"note.txt": "x\n"})
    work = f"{PLANT}; rm note.txt; mkdir sub; echo r=1 > sub/run.sh; ln -s sub/run.sh link; mkfifo fifo"
    verdict = await scored(provider, task, work)
    assert (verdict.reward, verdict.attempts) == (1.0, 2), "removed files are gone there too"
    assert verdict.clean_room is not None and verdict.clean_room.outcome is Outcome.PASSED


@pytest.mark.parametrize("trick", ["truncate -s 1T big", "mkdir -m 0 no"])
async def test_a_workdir_that_cannot_be_copied_is_no_verdict(
    provider: SandboxProvider, tmp_path: Path, trick: str
) -> None:
    verdict = await scored(provider, tiny_task(tmp_path), f"{PLANT}; {SOLVE}; {trick}")
    assert (verdict.reward, verdict.cause) == (None, Cause.VERIFIER_CRASH)
    assert "clean room" in verdict.detail


async def test_a_kept_service_passes_under_the_default_rules_and_can_be_ruled_out(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    test = "[ -e up ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    task = tiny_task(tmp_path, test=test, metadata={"termrl_keep_services": True})
    serve = "setsid bash -c 'touch up; sleep 60' >/dev/null 2>&1 & sleep 0.1"
    verdict = await scored(provider, task, serve)
    assert verdict.reward == 1.0 and {"kept_services"} == set(verdict.signals), verdict
    rules = VerifyRules(zero_on=frozenset({Signal.KEPT_SERVICES}))
    assert (await scored(provider, task, serve, rules)).cause is Cause.BROKE_VERIFIER


def test_the_config_takes_signals_by_name_and_refuses_others() -> None:
    config = TrainConfig.model_validate({"verify": {"zero_on": ["listeners"], "missing_verdict": "drop"}})
    assert config.verify.rules() == VerifyRules(frozenset({Signal.LISTENERS}), DEFAULT_RECHECK_ON, "drop")
    assert TrainConfig().verify.rules() == VerifyRules()
    with pytest.raises(ValidationError, match="planted_reward"):
        TrainConfig.model_validate({"verify": {"recheck_on": ["plantd_reward"]}})


def test_metrics_count_what_came_up_and_nothing_else() -> None:
    quiet = Verdict.scored(1.0)
    loud = Verdict.scored(0.0, signals={"killed": 1, "profiles": ["x"]})
    assert verdict_metrics([quiet]) == {}
    assert verdict_metrics([quiet, loud, loud]) == {"verify/signals/killed": 2, "verify/signals/profiles": 2}


@pytest.mark.parametrize("path", ["/app/src/x.py", "/root/notes", "/opt/data/x", "/home/me/a.txt", "/var/lib/x"])
def test_honest_places_are_no_signal(path: str) -> None:
    assert signal_of(path, workdir="/app") is None
