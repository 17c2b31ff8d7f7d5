"""The schema of task.toml: every key, legacy ones, all bad fields at once, and refusals by name."""

from __future__ import annotations

import pytest

from termrl.errors import TaskError
from termrl.tasks.config import parse_config, unsupported

FULL = """
schema_version = "1.4"
artifacts = ["/app/out.txt", {source = "/app/log", destination = "log", exclude = ["*.tmp"]}]
source = "somewhere"

[task]
name = "org/name"
version = "2"
description = "d"
authors = [{name = "A", email = "a@example.org"}]
keywords = ["k"]

[metadata]
anything = {goes = [1, 2]}

[environment]
build_timeout_sec = 900
docker_image = "debian:12"
os = "linux"
cpus = 0.5
memory_mb = 512
storage_mb = 1024
gpus = 0
env = {A = "1", B = "${HOME}"}
workdir = "/srv"
network_mode = "allowlist"
allowed_hosts = ["example.org"]

[agent]
timeout_sec = 120
user = "root"

[verifier]
timeout_sec = 60.5
env = {T = "x"}
user = 0
environment_mode = "shared"

[solution]
env = {S = "y"}
"""


def test_every_supported_key_is_read_without_a_warning() -> None:
    config, warnings = parse_config(FULL, "t/task.toml")
    assert warnings == []
    assert unsupported(config) == []
    assert config.task is not None
    assert config.task.short_name == "name"
    assert config.environment.cpus == 0.5
    assert config.environment.effective_network_mode == "allowlist"
    assert config.verifier.timeout_sec == 60.5
    assert [a.source for a in config.artifacts] == ["/app/out.txt", "/app/log"]


def test_defaults_are_harbors() -> None:
    config, warnings = parse_config("", "t")
    assert warnings == []
    assert config.schema_version == "1.4"
    assert config.environment.build_timeout_sec == 600
    assert config.environment.effective_network_mode == "public"
    assert config.agent.timeout_sec is None
    assert config.verifier.timeout_sec == 600


@pytest.mark.parametrize(
    ("text", "mib"), [("2G", 2048), ("512M", 512), ("1048576K", 1024), ("0.5G", 512), ("2g", 2048), (" 2G ", 2048)]
)
def test_legacy_sizes_with_the_three_suffixes_are_mib(text: str, mib: int) -> None:
    config, warnings = parse_config(f'[environment]\nmemory = "{text}"\nstorage = "{text}"', "t")
    assert (config.environment.memory_mb, config.environment.storage_mb) == (mib, mib)
    assert warnings == []


@pytest.mark.parametrize("text", ['"2GB"', '"2Gi"', '"2048"', "2048", '""', '"G"', '"-1G"', '"1K"'])
def test_other_sizes_are_errors_that_name_the_key(text: str) -> None:
    with pytest.raises(TaskError, match=r"^t: environment\.memory: "):
        parse_config(f"[environment]\nmemory = {text}", "t")


def test_a_legacy_size_that_disagrees_with_the_new_key_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"memory \(2048 MiB\) and memory_mb \(1024\) disagree"):
        parse_config('[environment]\nmemory = "2G"\nmemory_mb = 1024', "t")
    config, _ = parse_config('[environment]\nmemory = "2G"\nmemory_mb = 2048', "t")
    assert config.environment.memory_mb == 2048


@pytest.mark.parametrize(
    ("toml", "mode"),
    [
        ("allow_internet = false", "no-network"),
        ("allow_internet = true", "public"),
        ('allow_internet = false\nnetwork_mode = "public"', "public"),
        ('allowed_hosts = ["a.org"]', "allowlist"),
        ('network_mode = "no-network"', "no-network"),
    ],
)
def test_network_mode_comes_from_its_key_before_the_legacy_one(toml: str, mode: str) -> None:
    config, _ = parse_config(f"[environment]\n{toml}", "t")
    assert config.environment.effective_network_mode == mode


def test_legacy_version_is_the_schema_version() -> None:
    config, warnings = parse_config('version = "1.0"', "t")
    assert config.schema_version == "1.0"
    assert warnings == []


def test_every_bad_field_is_named_at_once_with_file_and_key() -> None:
    toml = """
    [task]
    name = "no org"
    [environment]
    cpus = "many"
    memory = "2GB"
    network_mode = "open"
    workdir = "relative"
    env = {"A=B" = "1"}
    [agent]
    timeout_sec = 0
    [verifier]
    timeout_sec = inf
    env = {N = 1}
    [metadata]
    termrl_userland = "guest"
    """
    with pytest.raises(TaskError) as caught:
        parse_config(toml, "dir/task.toml")
    lines = caught.value.message.splitlines()
    keys = {line.split(": ")[1] for line in lines}
    assert all(line.startswith("dir/task.toml: ") for line in lines)
    assert keys == {
        "task.name",
        "environment.cpus",
        "environment.memory",
        "environment.network_mode",
        "environment.workdir",
        "environment.env",
        "agent.timeout_sec",
        "verifier.timeout_sec",
        "verifier.env.N",
        "metadata",
    }


def test_invalid_toml_names_file_and_line() -> None:
    with pytest.raises(TaskError, match=r"^t/task\.toml: not valid TOML: .*line 2"):
        parse_config("[agent]\ntimeout_sec = = 3", "t/task.toml")


def test_unknown_keys_warn_with_their_name_and_a_suggestion() -> None:
    toml = """
    colour = "red"
    [environment]
    memroy_mb = 12
    [metadata]
    free = 1
    termrl_userlnd = "host"
    [[environment.mcp_servers]]
    name = "m"
    url = "http://x"
    shape = "round"
    """
    _, warnings = parse_config(toml, "t")
    assert warnings == [
        "t: unknown key colour",
        "t: unknown key environment.memroy_mb (did you mean memory_mb?)",
        "t: unknown key environment.mcp_servers.0.shape",
        "t: unknown key metadata.termrl_userlnd (did you mean termrl_userland?)",
    ]


def test_a_newer_major_schema_warns() -> None:
    _, warnings = parse_config('schema_version = "2.0"', "t")
    assert warnings == ["t: schema_version '2.0' is newer than 1.4"]


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ('[[steps]]\nname = "one"', "steps"),
        ('[environment]\nos = "windows"', "environment.os"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ('[environment]\ngpu_types = ["H100"]', "environment.gpu_types"),
        ('[environment.tpu]\ntype = "v5"\ntopology = "2x2"', "environment.tpu"),
        ('[[environment.mcp_servers]]\nname = "m"\nurl = "http://x"', "environment.mcp_servers"),
        ('[environment]\nskills_dir = "/skills"', "environment.skills_dir"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode"),
        ('[verifier.environment]\ndocker_image = "x"', "verifier.environment"),
        ('[[verifier.collect]]\ncommand = "true"', "verifier.collect"),
        ('[agent]\nnetwork_mode = "no-network"', "agent.network_mode"),
        ('[verifier]\nallowed_hosts = ["a.org"]', "verifier.network_mode"),
    ],
)
def test_what_cannot_be_run_yet_is_parsed_and_named(toml: str, key: str) -> None:
    config, warnings = parse_config(toml, "t")
    assert warnings == []
    assert [line.split(": ")[0] for line in unsupported(config)] == [key]


def test_a_phase_network_equal_to_the_environments_is_supported() -> None:
    config, _ = parse_config('[environment]\nallow_internet = false\n[agent]\nnetwork_mode = "no-network"', "t")
    assert unsupported(config) == []
    config, _ = parse_config('[environment]\nallowed_hosts = ["a"]\n[agent]\nallowed_hosts = ["a"]', "t")
    assert unsupported(config) == []
    config, _ = parse_config('[environment]\nallowed_hosts = ["a"]\n[agent]\nallowed_hosts = ["a", "b"]', "t")
    assert [line.split(": ")[0] for line in unsupported(config)] == ["agent.network_mode"]


@pytest.mark.parametrize(
    "toml",
    [
        '[environment]\nnetwork_mode = "public"\nallowed_hosts = ["a.org"]',
        '[environment]\nnetwork_mode = "allowlist"',
        '[[environment.mcp_servers]]\nname = "m"',
        '[[environment.mcp_servers]]\nname = "m"\ntransport = "stdio"',
        "[metadata]\ntermrl_keep_services = 1",
    ],
)
def test_contradictions_are_errors(toml: str) -> None:
    with pytest.raises(TaskError):
        parse_config(toml, "t")
