"""All problems of a launch at once, against a real environment server and the real state of this machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from termrl.errors import ConfigError
from termrl.integrations.miles.launch import node
from termrl.integrations.miles.launch.command import build
from termrl.integrations.miles.launch.findings import Problem
from termrl.integrations.miles.launch.preflight import CHECKS, preflight
from termrl.integrations.miles.launch.profile import load_profile
from termrl.validation.records import Report, Status, TaskReport
from tests.environment.server.served import Server, served, write_task
from tests.environment.upstreams import echo_app, hosted_in_thread, newer_app, older_app
from tests.integrations.launch.conftest import environ
from tests.integrations.launch.fake_miles import fake_miles, rows, settings

Termrl = Callable[..., subprocess.CompletedProcess[str]]
Found = Callable[..., dict[str, list[str]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two tasks, four sessions."""
    tasks = tmp_path_factory.mktemp("tasks")
    write_task(tasks, "one")
    write_task(tasks, "two", verifier_s=40)
    with served(tasks, "--max-sessions", "4") as running:
        yield running


@pytest.fixture
def found(tmp_path: Path, server: Server) -> Found:
    """Run the checks with further settings; messages by check, those of GPUs left out."""
    root = fake_miles(tmp_path)
    prompt_data = rows(tmp_path / "train.jsonl", ["one", "two"])
    given = settings(tmp_path, root, prompt_data)[1::2]

    def run(*more: str, skip: tuple[str, ...] = ("gpus",), **variables: str) -> dict[str, list[str]]:
        loaded = load_profile("qwen3-8b", settings=[*given, f"episodes.url={server.url}", *more], environ=variables)
        folder = tmp_path / "run"
        problems = preflight(loaded, build(loaded, folder), folder, environ=environ(), skip=skip)
        assert all(problem.hint for problem in problems)
        return _by_check(problems)

    return run


def _by_check(problems: list[Problem]) -> dict[str, list[str]]:
    by_check: dict[str, list[str]] = {}
    for problem in problems:
        by_check.setdefault(problem.check, []).append(("warning: " if problem.warning else "") + problem.message)
    return by_check


def test_sound_launch_has_no_problem(found: Found) -> None:
    assert found() == {}


def test_all_problems_are_told_at_once(tmp_path: Path, server: Server, termrl: Termrl) -> None:
    root = fake_miles(tmp_path)
    prompt_data = rows(tmp_path / "train.jsonl", ["one", "three"])
    given = [
        *settings(tmp_path, root, prompt_data),
        *("--set", "session.tito_model=kimi26", "--set", "rollout.n_samples_per_prompt=4"),
        *("--set", "episodes.message_timeout_s=20", "--set", "episodes.sandbox_ttl_s=60"),
        *("--set", "preflight.disk_gb=1e9", "--set", f"episodes.token_file={tmp_path / 'none'}"),
        *("--set", "wandb.use_wandb=true", "--run-dir", str(tmp_path / "run"), "--skip-preflight", "environment"),
    ]
    done = termrl("miles", "qwen3-8b", *given, OPENENV_ENV_URL=server.url, HOME=str(tmp_path))
    assert done.returncode == 1
    for said in (
        "error: miles: session.tito_model kimi26: this miles has default, qwen3, glm47",
        "error: credentials: episodes.token_file",
        "error: credentials: W&B is on",
        "error: deadlines: sandboxes end after 60 s",
        "error: disk:",
        "error: gpus: this machine has 0 GPUs, 8 are asked for",
        "nothing was started",
    ):
        assert said in done.stderr, said
    assert done.stderr.count("  hint: ") >= 6
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "seen.json").exists()


def test_check_ends_without_starting_anything(tmp_path: Path, server: Server, termrl: Termrl) -> None:
    root = fake_miles(tmp_path)
    given = settings(tmp_path, root, rows(tmp_path / "train.jsonl", ["one", "two"]))
    run = ("--run-dir", tmp_path / "run", "--skip-preflight", "gpus")
    done = termrl("miles", "qwen3-8b", *given, *run, "--check", OPENENV_ENV_URL=server.url)
    assert (done.returncode, done.stdout) == (0, "termrl launch: all checks hold\n"), done.stderr
    assert not (tmp_path / "run").exists()


def test_environment_with_too_few_sessions(found: Found) -> None:
    (message,) = found("rollout.n_samples_per_prompt=4", "rollout.global_batch_size=8")["environment"]
    assert "has 4 sessions for 8 episodes at once" in message


def test_environment_with_too_little_memory(found: Found, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    write_task(tasks, "one", memory_mb=100)
    write_task(tasks, "two", memory_mb=200)
    with served(tasks, "--max-sessions", "4", "--max-memory-mb", "700") as small:
        (message,) = found(f"episodes.url={small.url}")["environment"]
    assert message.startswith("warning: ") and "has 700 MiB for tasks; 4 of the largest at once use 800 MiB" in message


def test_token_file_opens_the_environment_and_its_lack_is_told(found: Found, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    write_task(tasks, "one")
    write_task(tasks, "two")
    (tmp_path / "token").write_text("the-token-0123456789")
    with served(tasks, "--max-sessions", "4", env={"TERMRL_TOKEN": "the-token-0123456789"}) as guarded:
        assert found(f"episodes.url={guarded.url}", f"episodes.token_file={tmp_path / 'token'}") == {}
        (message,) = found(f"episodes.url={guarded.url}")["environment"]
    assert "wants a bearer token" in message


def test_other_servers_are_tried(found: Found, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    write_task(tasks, "one")
    with hosted_in_thread(older_app(tasks, max_sessions=2)) as url:
        few, scoring = found(f"episodes.url={url}")["environment"]
    assert few.startswith(f"{url} has 2 sessions for 4 episodes at once")
    assert scoring == f"warning: {url} does not score by the tasks' own tests/test.sh"
    with hosted_in_thread(newer_app(tasks, max_sessions=4)) as url:
        assert found(f"episodes.url={url}") == {}
    with hosted_in_thread(echo_app()) as url:
        assert found(f"episodes.url={url}")["environment"] == [f"{url} is no terminal environment"]


def test_environment_that_does_not_answer(found: Found) -> None:
    begun = time.monotonic()
    (message,) = found("episodes.url=http://127.0.0.1:9")["environment"]
    assert "no answer" in message
    assert time.monotonic() - begun < 10


def test_tasks_that_are_not_served(found: Found, tmp_path: Path) -> None:
    path = rows(tmp_path / "more.jsonl", ["one", "two", "three", "four"])
    (message,) = found(f"paths.prompt_data={path}")["tasks"]
    assert message == "2 of 4 tasks of the prompt file cannot be had: three, four"


def test_tasks_that_a_validation_report_does_not_call_sound(found: Found, tmp_path: Path) -> None:
    results = {"one": TaskReport(status=Status.SOUND), "three": TaskReport(status=Status.SOUND)}
    report = Report(tasks="t", sandbox="bubblewrap", repeat=1, complete=True, wall_s=1, termrl="0", results=results)
    report.write(tmp_path / "report.json")
    (message,) = found(f"preflight.validation={tmp_path / 'report.json'}")["tasks"]
    assert message == "1 of 2 tasks of the prompt file are not sound: two (not validated)"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "missing or empty"),
        ("{not json}\n", "line 1: "),
        ('{"prompt": "text", "metadata": {"task_id": "one"}}\n', "line 1: prompt is not a list of chat messages"),
        ('{"prompt": [{"role": "user", "content": ""}], "metadata": null}\n', "line 1: metadata.task_id is missing"),
        ("[1]\n", "line 1: not an object"),
        (
            '{"prompt": [{"role": "user"}], "metadata": {"task_id": "one"}}\n',
            "1 rows, fewer than rollout.rollout_batch_size 2",
        ),
    ],
)
def test_prompt_file_that_cannot_be_used(text: str, why: str, found: Found, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    assert why in found(f"paths.prompt_data={tmp_path / 'bad.jsonl'}")["prompt-data"][0]


@pytest.mark.parametrize("name", ["daytona", "e2b", "modal", "Modal", "agentenv"])
def test_hosted_sandboxes_are_refused_once_naming_the_variable(name: str, found: Found) -> None:
    messages = found(OPENENV_SANDBOX_BACKEND=name, OPENENV_TB2_TASKS_DIR="/tasks")["sandbox"]
    assert messages[0].startswith(f"OPENENV_SANDBOX_BACKEND={name.lower()}: hosted sandboxes are not supported")


def test_sandboxes_on_the_workers_need_their_tasks(found: Found) -> None:
    assert (
        "not the folder of the tasks" in found("episodes.url=none", OPENENV_SANDBOX_BACKEND="bubblewrap")["sandbox"][0]
    )


def test_tests_that_may_outlast_one_answer(found: Found) -> None:
    (message,) = found("episodes.message_timeout_s=35")["deadlines"]
    assert message == "the tests of 1 tasks may take up to 40 s, one answer of the environment 35 s: two"


def test_miles_that_cannot_be_imported_or_lacks_what_is_used(found: Found, tmp_path: Path) -> None:
    arguments = tmp_path / "miles-checkout" / "miles" / "utils" / "arguments.py"
    arguments.write_text(arguments.read_text().replace("--tito-model", "--other"))
    (tmp_path / "miles-checkout" / "miles" / "rollout" / "generate_hub" / "agentic_tool_call.py").unlink()
    (message,) = found()["miles"]
    assert message.endswith("lacks what it is driven by: rollout/generate_hub/agentic_tool_call.py, --tito-model")
    messages = found(f"paths.miles={tmp_path}")["miles"]
    assert messages[0].startswith("miles cannot be imported")


def test_python_without_termrl_is_told(found: Found) -> None:
    (message,) = found("env.PYTHONPATH=/nowhere", "paths.python=/usr/bin/python3")["machine"]
    assert "cannot import termrl.integrations.miles" in message
    (message,) = found("paths.python=/no/python")["machine"]
    assert "No such file" in message


def test_several_nodes_need_a_ray_cluster(found: Found) -> None:
    (message,) = found("cluster.nodes=2", skip=())["gpus"]
    assert message == "2 nodes are asked for, but no Ray cluster"


def test_measured_faults_above_two_percent_are_warned_about(found: Found, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    episodes = [{"task_id": "one", "sample": n, "reward": None if n < 5 else 0} for n in range(100)]
    path.write_bytes(b"".join(orjson.dumps(episode) + b"\n" for episode in episodes))
    (message,) = found(f"preflight.results={path}", "rollout.n_samples_per_prompt=2")["faults"]
    assert message.startswith("warning: 5.0% of 100 measured episodes have no verdict")
    assert "10% of the groups" in message
    path.write_bytes(b"".join(orjson.dumps({**episode, "reward": 1}) + b"\n" for episode in episodes))
    assert found(f"preflight.results={path}") == {}


def test_open_files(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termrl.integrations.miles.launch.machine_checks._FILES_OF_MILES", 1 << 40)
    assert "open files where miles runs" in found()["open-files"][0]


def test_skipped_checks_are_named_and_unknown_ones_refused(found: Found) -> None:
    assert found("episodes.url=http://127.0.0.1:9", skip=("environment", "gpus")) == {}
    with pytest.raises(ConfigError, match="no such check"):
        found(skip=("gpu",))
    assert "gpus" in CHECKS


def test_facts_survive_the_noise_of_a_log() -> None:
    assert node.found_in("noise\n") is None
    facts = node.found_in(f'warning\n{node.MARK}{{"gpus": 3}}\nmore\n')
    assert facts is not None and facts.gpus == 3
