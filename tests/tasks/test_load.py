"""Loading one folder: the odd inputs that real task collections hold."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from termrl.errors import TaskError
from termrl.sandboxes.base import Healthcheck, ImageBuild
from termrl.tasks import digest, load_task
from termrl.tasks.load import strip_canary
from tests.tasks.helpers import MINIMAL, write_task

IMAGE = '[environment]\ndocker_image = "debian:12"\n'


def test_a_minimal_task_is_loaded_frozen_with_harbors_defaults(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "plain"))
    assert (task.id, task.family, task.level) == ("plain", "plain", None)
    assert task.instruction == "Do it."
    assert task.verifier_timeout_s == 600
    assert task.agent_timeout_s is None
    assert task.solution is None
    assert task.warnings == ()
    assert task.sandbox.host_userland
    assert (task.sandbox.workdir, task.sandbox.network_mode, task.sandbox.files) == ("/app", "no-network", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.id = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_settings_reach_the_sandbox_and_the_budgets(tmp_path: Path) -> None:
    toml = """
    [task]
    name = "org/given"
    [metadata]
    family = "fam"
    level = 2
    [environment]
    docker_image = "img@sha256:0"
    workdir = "/srv"
    cpus = 2
    memory = "2G"
    storage_mb = 64
    env = {A = "${NOT_SET_ANYWHERE}"}
    [agent]
    timeout_sec = 30
    [verifier]
    timeout_sec = 40
    env = {V = "1"}
    [solution]
    env = {S = "2"}
    """
    folder = write_task(tmp_path / "x", toml=toml, files={"environment/a.txt": "a", "solution/solve.sh": "true"})
    task = load_task(folder)
    box = task.sandbox
    assert (task.id, task.family, task.level, box.task_id) == ("given", "fam", 2, "given")
    assert (box.image, box.workdir, box.cpus, box.memory_mb, box.storage_mb) == ("img@sha256:0", "/srv", 2, 2048, 64)
    assert box.files == folder.resolve() / "environment"
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (30, 40)
    assert (task.verifier_env, task.solution_env) == ({"V": "1"}, {"S": "2"})
    assert task.solution == folder.resolve() / "solution"
    with pytest.raises(TaskError, match=r"task\.toml: environment\.env\.A: the host variable NOT_SET_ANYWHERE"):
        task.resolved_sandbox()


def test_the_sandbox_environment_is_filled_from_the_host_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task(write_task(tmp_path / "x", toml=MINIMAL + 'env = {A = "${TASK_A}"}'))
    monkeypatch.setenv("TASK_A", "filled")
    assert task.resolved_sandbox().env == {"A": "filled"}
    assert task.sandbox.env == {"A": "${TASK_A}"}


def test_a_folder_without_task_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"x: no task\.toml"):
        load_task(write_task(tmp_path / "x", toml=None))
    with pytest.raises(TaskError, match="nowhere: no such folder"):
        load_task(tmp_path / "nowhere")


def test_a_path_that_the_system_refuses_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read: File name too long"):
        load_task(tmp_path / ("x" * 300))


@pytest.mark.parametrize("text", ["", " \n\n", "<!-- canary GUID 1 -->\n\n"])
def test_an_empty_instruction_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(TaskError, match=r"instruction\.md: empty"):
        load_task(write_task(tmp_path / "x", instruction=text))


def test_missing_instruction_and_tests_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"instruction\.md: missing"):
        load_task(write_task(tmp_path / "a", instruction=None))
    with pytest.raises(TaskError, match=r"tests/test\.sh: missing"):
        load_task(write_task(tmp_path / "b", test=None))
    with pytest.raises(TaskError, match=r"tests/test\.sh: empty"):
        load_task(write_task(tmp_path / "c", test="\n"))
    with pytest.raises(TaskError, match=r"test\.sh: left out by \.harborignore"):
        load_task(write_task(tmp_path / "d", files={"tests/.harborignore": "*.sh\n"}))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<!-- BENCHMARK canary GUID -->\n# harbor-canary 1\n\n\nDo it", "Do it"),
        ("# Canary x\n# A title\ntext", "# A title\ntext"),
        ("# A title\n# canary x", "# A title\n# canary x"),
        ("find the canary", "find the canary"),
        ("\n\nDo it", "Do it"),
    ],
)
def test_only_leading_canary_comments_and_blanks_after_them_are_stripped(text: str, left: str) -> None:
    assert strip_canary(text) == left


def test_instruction_braces_are_not_templated(tmp_path: Path) -> None:
    text = "Fill {{ name }} and {% raw %}${{ x }}{% endraw %} and {instruction}"
    assert load_task(write_task(tmp_path / "x", instruction=text)).instruction == text


def test_non_ascii_crlf_and_a_byte_order_mark_in_the_instruction(tmp_path: Path) -> None:
    raw = "\ufeffSchreibe „Grüße“ 你好\r\nzweite Zeile\r\n".encode()
    assert load_task(write_task(tmp_path / "x", instruction=raw)).instruction == "Schreibe „Grüße“ 你好\nzweite Zeile"


def test_an_instruction_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"instruction\.md: not UTF-8"):
        load_task(write_task(tmp_path / "x", instruction=b"caf\xe9"))


def test_a_50_kb_instruction_is_whole(tmp_path: Path) -> None:
    text = "word " * 10_000 + "end"
    assert load_task(write_task(tmp_path / "x", instruction=text)).instruction == text


def test_a_late_shebang_or_a_missing_run_bit_is_fine(tmp_path: Path) -> None:
    late = write_task(tmp_path / "a", test="\n# a note\n#!/bin/bash\necho 1\n")
    (late / "tests" / "test.sh").chmod(0o600)
    assert load_task(late).warnings == ()


def test_a_test_script_with_windows_line_ends_is_refused_and_a_few_such_lines_warn(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"tests/test\.sh: has Windows line ends \(CRLF\)") as caught:
        load_task(write_task(tmp_path / "a", test=b"#!/bin/bash\r\necho 1\r\n"))
    assert caught.value.hint is not None and "sed -i 's/\\r$//'" in caught.value.hint
    data = b"#!/bin/bash\ncat > x <<'E'\nsome\r\ndata\r\nE\necho 1 > /logs/verifier/reward.txt\n"
    (warning,) = load_task(write_task(tmp_path / "b", test=data)).warnings
    assert "test.sh: some lines have Windows line ends" in warning
    (warning,) = load_task(write_task(tmp_path / "c", files={"solution/solve.sh": b"true\r\n"})).warnings
    assert "solve.sh: has Windows line ends" in warning


def test_what_docker_can_do_reaches_the_sandbox(tmp_path: Path) -> None:
    toml = """
    [environment]
    build_timeout_sec = 33
    network_mode = "allowlist"
    allowed_hosts = ["pypi.org"]
    [environment.healthcheck]
    command = "test -e /ready"
    interval_sec = 1
    retries = 7
    [agent]
    user = "bob"
    [verifier]
    user = 1000
    """
    folder = write_task(tmp_path / "x", toml=toml, files={"environment/Dockerfile": "FROM debian\n"})
    task = load_task(folder)
    box = task.sandbox
    assert box.build == ImageBuild(folder.resolve() / "environment", 33)
    assert (box.image, box.user, box.verifier_user) == (None, "bob", "1000")
    assert (box.network_mode, box.allowed_hosts) == ("allowlist", ("pypi.org",))
    assert box.healthcheck == Healthcheck("test -e /ready", interval_s=1, retries=7)
    pinned = load_task(write_task(tmp_path / "y", toml=IMAGE, files={"environment/Dockerfile": "FROM debian\n"}))
    assert (pinned.sandbox.image, pinned.sandbox.build) == ("debian:12", None)


def test_a_syntax_error_in_the_tests_is_a_warning_with_file_and_line(tmp_path: Path) -> None:
    files = {"tests/test_a.py": "x = 1\ndef f(:\n", "tests/sub/test_b.py": "assert '\\d'\n", "tests/c.py": b"\0"}
    warnings = load_task(write_task(tmp_path / "x", files=files)).warnings
    assert len(warnings) == 2
    assert "tests/c.py: " in warnings[0]
    assert "tests/test_a.py: SyntaxError at line 2" in warnings[1]


def test_extra_binary_and_mis_suffixed_files_and_odd_names_load(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "tests/data/expected output ü.bin": bytes(range(256)),
        "tests/picture.txt": b"\x89PNG\r\n",
        "environment/名前 with space.txt": "x",
        "environment/docker-compose.yml": "services: {}",
    }
    task = load_task(write_task(tmp_path / "näme with space", files=files))
    assert task.id == "näme with space"
    assert task.warnings == ()
    assert task.sandbox.files is not None


@pytest.mark.parametrize("name", ["environment/docker-compose.yaml", "steps/one/instruction.md", "trajectory.json"])
def test_unsupported_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError, match=rf"{'/'.join(name.split('/')[:1])}.*not supported yet"):
        load_task(write_task(tmp_path / "x", files={name: "x"}))


def test_all_unsupported_features_are_refused_at_once(tmp_path: Path) -> None:
    toml = IMAGE + 'gpus = 1\nskills_dir = "/s"\n[[steps]]\nname = "a"'
    with pytest.raises(TaskError) as caught:
        load_task(write_task(tmp_path / "x", toml=toml, files={"environment/docker-compose.yaml": ""}))
    message = caught.value.message
    assert [word for word in ("steps", "environment.gpus", "skills_dir", "docker-compose.yaml") if word in message] == [
        "steps",
        "environment.gpus",
        "skills_dir",
        "docker-compose.yaml",
    ]


def test_artifacts_warn(tmp_path: Path) -> None:
    (warning,) = load_task(write_task(tmp_path / "x", toml=f'artifacts = ["/a"]\n{MINIMAL}')).warnings
    assert "artifacts" in warning


def test_a_task_that_says_nothing_about_its_sandbox_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="nothing says what the sandbox is made from"):
        load_task(write_task(tmp_path / "x", toml="", files={"environment/a.txt": "a"}))


def test_host_userland_and_a_dockerfile_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="termrl_userland"):
        load_task(write_task(tmp_path / "x", files={"environment/Dockerfile": "FROM debian"}))


def test_with_a_dockerfile_the_images_workdir_counts_and_files_are_not_uploaded(tmp_path: Path) -> None:
    dockerfile = "FROM debian\nWORKDIR /srv/data\nCOPY a.txt .\n"
    files = {"environment/Dockerfile": dockerfile, "environment/a.txt": "a"}
    task = load_task(write_task(tmp_path / "x", toml=IMAGE, files=files))
    assert (task.sandbox.workdir, task.sandbox.files, task.warnings) == (None, None, ())
    task = load_task(write_task(tmp_path / "y", toml=IMAGE + 'workdir = "/w"', files=files))
    assert task.sandbox.workdir == "/w"


def test_a_missing_copy_source_is_an_error_unless_the_image_is_pinned(tmp_path: Path) -> None:
    files = {"environment/Dockerfile": "FROM debian\nCOPY gone.txt /x/\n"}
    with pytest.raises(TaskError, match=r"Dockerfile: COPY source gone\.txt is missing"):
        load_task(write_task(tmp_path / "a", toml="", files=files))
    (warning,) = load_task(write_task(tmp_path / "b", toml=IMAGE, files=files)).warnings
    assert "COPY source gone.txt is missing" in warning


def test_workdir_solution_warns_and_workdir_tests_is_refused(tmp_path: Path) -> None:
    (warning,) = load_task(write_task(tmp_path / "a", toml=IMAGE + 'workdir = "/solution"')).warnings
    assert "collides with where the oracle's solution is put" in warning
    with pytest.raises(TaskError, match="where the verifier puts its own files"):
        load_task(write_task(tmp_path / "b", toml=IMAGE + 'workdir = "/tests/x"'))


def test_symlinks_that_leave_the_task_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    for name, target in {"a": "../../../secret", "b": str(tmp_path), "c": "/etc/passwd", "d": "../../../gone"}.items():
        folder = write_task(tmp_path / name, files={"environment/x.txt": ""})
        (folder / "environment" / "link").symlink_to(target)
        with pytest.raises(TaskError, match=r"environment/link: the link leaves the task folder"):
            load_task(folder)


def test_links_inside_the_task_load_and_cycles_are_refused(tmp_path: Path) -> None:
    good = write_task(tmp_path / "good", files={"environment/sub/x.txt": ""})
    (good / "environment" / "link").symlink_to("sub/x.txt")
    (good / "environment" / "folder").symlink_to("sub")
    load_task(good)
    parent = write_task(tmp_path / "parent", files={"environment/sub/x.txt": ""})
    (parent / "environment" / "sub" / "up").symlink_to("..")
    itself = write_task(tmp_path / "itself", files={"environment/x.txt": ""})
    (itself / "environment" / "me").symlink_to("me")
    twins = write_task(tmp_path / "twins", files={"environment/a/x": "", "environment/b/x": ""})
    (twins / "environment" / "a" / "to_b").symlink_to("../b")
    (twins / "environment" / "b" / "to_a").symlink_to("../a")
    for folder in (parent, itself, twins):
        with pytest.raises(TaskError, match="the link leads"):
            load_task(folder)


def test_a_pipe_in_a_task_is_refused_rather_than_read(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "x", files={"environment/a": ""})
    os.mkfifo(folder / "environment" / "pipe")
    with pytest.raises(TaskError, match="environment/pipe: neither a file"):
        load_task(folder)


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("curl -LsSf https://x | sh", True),
        ("apt-get update && apt-get install -y x", True),
        ("/usr/bin/wget x", True),
        ("uvx -p 3.13 pytest /tests", True),
        ("pip install pytest", True),
        ("# curl would be nice", False),
        ("pytest /tests/test_curly.py --pip-free uv.lock", False),
        ("cat /app/pip.conf", False),
    ],
)
def test_tests_that_fetch_are_recognised_where_there_is_a_network(tmp_path: Path, line: str, uses: bool) -> None:
    test = f"#!/bin/bash\n{line}\n"
    assert load_task(write_task(tmp_path / "a", toml=IMAGE, test=test)).tests_use_network is uses
    assert load_task(write_task(tmp_path / "b", test=test)).tests_use_network is False


def test_the_digest_is_of_names_kinds_run_bits_and_contents_only(tmp_path: Path) -> None:
    a = write_task(tmp_path / "a", files={"environment/x.txt": "1"})
    b = write_task(tmp_path / "b", files={"environment/x.txt": "1"})
    os.utime(b / "task.toml", (1, 1))
    same = digest(a)
    assert digest(b) == same
    changes = {
        "content": lambda: (b / "environment" / "x.txt").write_text("2"),
        "run bit": lambda: (b / "tests" / "test.sh").chmod(0o755),
        "name": lambda: (b / "environment" / "x.txt").rename(b / "environment" / "y.txt"),
        "folder": lambda: (b / "empty").mkdir(),
        "link": lambda: (b / "link").symlink_to("task.toml"),
    }
    seen = {same}
    for change in changes.values():
        change()
        seen.add(digest(b))
    assert len(seen) == len(changes) + 1
