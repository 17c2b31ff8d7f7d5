"""The variables of the agent function's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.errors import ConfigError
from termrl.integrations.miles.call import policy_url
from termrl.integrations.miles.settings import HOSTED, read_settings


def test_without_variables_they_are_those_of_the_first_adapter() -> None:
    settings = read_settings({})
    assert settings.url == "http://localhost:8003"
    assert (settings.max_turns, settings.message_timeout_s, settings.wall_s) == (30, 1200.0, 3600.0)
    assert (settings.remote.legacy_workdir, settings.remote.legacy_tests_src) == ("/app", "/task/tests")
    assert settings.model_name == "model"


def test_each_variable_is_read(tmp_path: Path) -> None:
    settings = read_settings(
        {
            "OPENENV_ENV_URL": "http://box:9000",
            "OPENENV_MAX_TURNS": "7",
            "OPENENV_MESSAGE_TIMEOUT_S": "2000",
            "OPENENV_MAX_ROLLOUT_TIME_SECONDS": "90",
            "OPENENV_TASK_WORKDIR": "",
            "OPENENV_TB2_TESTS_SRC": "/srv/tests",
            "OPENENV_TOKEN_FILE": str(tmp_path / "token"),
            "AGENT_MODEL_NAME": "glm",
            "MILES_ROUTER_EXTERNAL_HOST": "10.0.0.9",
            "UNKNOWN": "x",
            "TERMRL_TRAINING__LR": "1",
        }
    )
    assert (settings.url, settings.max_turns, settings.wall_s) == ("http://box:9000", 7, 90.0)
    assert (settings.remote.reset_s, settings.remote.legacy_workdir) == (2000.0, "")
    assert (settings.remote.legacy_tests_src, settings.remote.token_file) == ("/srv/tests", tmp_path / "token")
    assert (settings.model_name, settings.external_host) == ("glm", "10.0.0.9")


def test_the_older_model_variable_gives_way_to_the_newer() -> None:
    assert read_settings({"SWE_AGENT_MODEL_NAME": "a"}).model_name == "a"
    assert read_settings({"SWE_AGENT_MODEL_NAME": "a", "AGENT_MODEL_NAME": "b"}).model_name == "b"


def test_a_file_holds_the_rest_and_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("max_turns = 5\noutput_chars = 900\n[environment]\ncapacity_wait_s = 9\n")
    environ = {"OPENENV_CONFIG": str(file), "OPENENV_MAX_TURNS": "6"}
    settings = read_settings(environ)
    assert (settings.max_turns, settings.output_chars, settings.remote.capacity_wait_s) == (6, 900, 9.0)
    file.write_text("output_chars = 901\n\n")
    assert read_settings(environ).output_chars == 901


@pytest.mark.parametrize("name", HOSTED)
def test_a_hosted_backend_is_refused_by_the_variable(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^OPENENV_SANDBOX_BACKEND: .*hosted"):
        read_settings({"OPENENV_SANDBOX_BACKEND": name, "OPENENV_TB2_TASKS_DIR": "/tasks"})


def test_bad_values_are_all_told_at_once_each_by_its_variable() -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(
            {
                "OPENENV_MAX_TURNS": "none",
                "OPENENV_ENV_URL": "http://user:pw@box",
                "OPENENV_SANDBOX_BACKEND": "vm",
                "OPENENV_CONFIG": "/no/such/file",
            }
        )
    told = caught.value.message
    for name in ("OPENENV_MAX_TURNS", "OPENENV_ENV_URL", "OPENENV_SANDBOX_BACKEND", "/no/such/file"):
        assert name in told
    assert "user:pw" not in told and "http://…@box" in told


@pytest.mark.parametrize(
    "environ",
    [
        {"OPENENV_SANDBOX_BACKEND": "docker"},
        {"OPENENV_SANDBOX_BACKEND": "docker", "OPENENV_TB2_TASKS_DIR": "/t", "OPENENV_ENV_URL": "http://box"},
    ],
)
def test_a_backend_needs_tasks_and_no_server(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="OPENENV_"):
        read_settings(environ)


@pytest.mark.parametrize(
    ("base_url", "host", "expected"),
    [
        ("http://10.0.0.1:30000/sessions/a", None, "http://10.0.0.1:30000/sessions/a/v1"),
        ("http://10.0.0.1:30000/sessions/a/", "proxy", "http://proxy:30000/sessions/a/v1"),
        ("http://10.0.0.1/sessions/a", "proxy", "http://proxy/sessions/a/v1"),
        ("http://[::1]:30000/sessions/a", "fe80::2", "http://[fe80::2]:30000/sessions/a/v1"),
    ],
)
def test_the_host_is_rewritten(base_url: str, host: str | None, expected: str) -> None:
    assert policy_url(base_url, host) == expected
