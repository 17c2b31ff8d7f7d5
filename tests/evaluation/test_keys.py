"""Keys go only where they are meant to."""

from __future__ import annotations

from pathlib import Path

import pytest

from termrl.errors import ConfigError
from termrl.evaluation.config import EvalConfig, PolicyConfig
from termrl.evaluation.keys import api_key
from termrl.settings import load_settings

SECRET = "sk-very-secret-0123456789"
AMBIENT = {"OPENAI_API_KEY": SECRET, "MY_KEY": "another-key-42"}


def policy(url: str, **settings: object) -> PolicyConfig:
    return PolicyConfig.model_validate({"base_url": url, "model": "m", **settings})


def test_openais_own_key_is_taken_for_openais_own_host() -> None:
    assert api_key(policy("https://api.openai.com/v1"), AMBIENT) == SECRET


@pytest.mark.parametrize(
    "url",
    [
        "http://api.openai.com/v1",
        "https://api.openai.com.example.org/v1",
        "https://example.org/api.openai.com/v1",
        "https://openai.com/v1",
        "https://openrouter.ai/api/v1",
        "http://127.0.0.1:8000/v1",
    ],
)
def test_any_other_endpoint_gets_no_key_that_was_not_named_for_it(url: str) -> None:
    assert api_key(policy(url), AMBIENT) is None
    assert api_key(policy(url, api_key_env="MY_KEY"), AMBIENT) == "another-key-42"


def test_a_key_file_is_read_without_its_newline(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{SECRET}\n")
    assert api_key(policy("https://example.org/v1", api_key_file=tmp_path / "key"), {}) == SECRET


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"line\nline", b"caf\xc3\xa9", b"\x00\x01"])
def test_what_is_no_key_is_refused_without_being_repeated(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        api_key(policy("https://example.org/v1", api_key_file=tmp_path / "key"), {})
    assert "not a key" in error.value.message
    assert "words" not in error.value.message


def test_a_key_given_in_place_of_a_variables_name_is_not_found() -> None:
    with pytest.raises(ConfigError, match="is not set") as error:
        api_key(policy("https://example.org/v1", api_key_env="NO_SUCH_KEY"), AMBIENT)
    assert error.value.hint == "give the variable's name, not the key"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy.base_url=http://me:pw@host/v1", "--policy.model=m"], "user or password"),
        (["--policy.base_url=http://host/v1?key=pw", "--policy.model=m"], "query"),
        (["--policy.base_url=ftp://host/v1", "--policy.model=m"], "http"),
        (["--policy.base_url=http://host/v1"], "policy.model is needed"),
        (["--policy.api_key_env=K"], "needs the policy.base_url"),
        (
            ["--policy.base_url=http://h/v1", "--policy.model=m", "--policy.api_key_env=K", "--policy.api_key_file=F"],
            "give one",
        ),
    ],
)
def test_settings_that_contradict_themselves_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(EvalConfig, flags=flags)
    assert words in error.value.message


@pytest.mark.parametrize("url", ["http://me:hunter2@host/v1", "https://host/v1?key=hunter2", "ftp://me:hunter2@host"])
@pytest.mark.parametrize("key", ["policy.base_url", "environment.url"])
def test_a_secret_in_a_url_is_not_repeated(key: str, url: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(EvalConfig, flags=[f"--{key}={url}", "--policy.model=m"])
    assert "host" in error.value.message
    assert "hunter2" not in error.value.message
