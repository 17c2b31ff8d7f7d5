"""``termrl eval`` as users call it: killed, resumed, refused, and what it says and exits with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from termrl.runs.files import read_jsonl
from tests.evaluation.chat_server import MODEL, Answer, Call, ChatServer, chat_server, gives_up, solves

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(solves) as running:
        yield running


def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "termrl", "eval", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: object, **variables: str) -> tuple[int, str, str]:
    process = start(*arguments, **variables)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "results.jsonl"))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def of_words(call: Call) -> Answer:
    """Which attempts pass depends on nothing but the task and the seed."""
    return solves(call) if call.word == "apple" or call.body["seed"] % 2 else gives_up(call)


def settled(figures: dict[str, Any]) -> dict[str, Any]:
    """The summary without what measures time or says where it is."""
    return {k: v for k, v in figures.items() if k not in ("seconds", "wall_s", "run_dir", "retried_causes")}


def test_it_measures_and_says_so(server: ChatServer, tasks: Path, tmp_path: Path) -> None:
    server.answer = of_words
    code, out, error = run(tasks, "--base-url", server.url, "-m", MODEL, "-k", 2, "-n", 4, "-o", tmp_path / "run")
    assert code == 0, error
    found = summary(tmp_path / "run")
    assert found["graded"] == 6
    assert f"{found['passed']} of 6 attempts with a verdict passed (3 tasks)" in out
    assert f"pass@2  {found['pass_at']['2']['value']:.3f}  [" in out
    assert "Wilson score interval at 95 %" in out
    assert f"solved {len(found['solved'])} of 3" in out
    assert "results in" in error
    assert 'opening = "terminal-bench"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_killed_evaluation_resumes_with_every_attempt_once_and_the_same_totals(
    server: ChatServer, tasks: Path, tmp_path: Path
) -> None:
    def slowly(call: Call) -> Answer:
        time.sleep(0.03)
        return of_words(call)

    server.answer = slowly
    arguments = [tasks, "--base-url", server.url, "-m", MODEL, "-k", 8, "-n", 2]
    code, _, error = run(*arguments, "-o", tmp_path / "whole")
    assert code == 0, error
    folder = tmp_path / "killed"
    process = start(*arguments, "-o", folder)
    for wanted in (3, 12):
        deadline = time.monotonic() + 60
        while len(lines(folder)) < wanted and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert wanted <= len(lines(folder)) < 24
        assert not (folder / "summary.json").exists()
        process = start("--resume", folder)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "attempts have a verdict already" in error
    assert len(lines(folder)) == len({(line["task_id"], line["sample"]) for line in lines(folder)}) == 24
    assert settled(summary(folder)) == settled(summary(tmp_path / "whole"))
    assert {(line["task_id"], line["sample"], line["seed"], line["reward"]) for line in lines(folder)} == {
        (line["task_id"], line["sample"], line["seed"], line["reward"]) for line in lines(tmp_path / "whole")
    }


def test_a_resume_makes_only_what_is_missing_or_has_no_verdict(server: ChatServer, tasks: Path, tmp_path: Path) -> None:
    server.answer = lambda call: Answer(drop=True) if call.word == "berry" else solves(call)
    fast = ["--retries=0"]
    folder = tmp_path / "run"
    code, out, error = run(tasks, "--base-url", server.url, "-m", MODEL, "-k", 2, "-o", folder, *fast)
    assert code == 1
    assert "no verdict: 2 engine_error" in out
    assert "without any verdict: make-berry" in out
    assert "solved 2 of 3; not solved: none" in out
    assert "eval --resume" in error
    assert "make-berry: no verdict: engine_error" in error
    kept = [line for line in lines(folder) if line["reward"] is not None]
    # a kill in mid-write leaves half a line
    with (folder / "results.jsonl").open("ab") as file:
        file.write(b'{"task_id": "make-apple", "samp')
    server.answer, server.calls = solves, []
    code, _, error = run("--resume", folder)
    assert code == 0, error
    assert {call.word for call in server.calls} == {"berry"}
    assert [line for line in lines(folder) if line["task_id"] != "make-berry"] == kept
    assert summary(folder)["passed"] == 6
    lost = list(read_jsonl(folder / "lost.jsonl"))
    assert [(line["task_id"], line["reward"]) for line in lost] == [("make-berry", None)] * 2

    server.calls = []
    code, out, _ = run("--resume", folder, "--json")
    assert (code, server.calls) == (0, [])
    assert json.loads(out)["passed"] == 6


def test_a_resume_with_other_settings_or_tasks_is_refused(server: ChatServer, tasks: Path, tmp_path: Path) -> None:
    import shutil

    own = tmp_path / "tasks"
    shutil.copytree(tasks, own)
    folder = tmp_path / "run"
    code, _, error = run(own, "--base-url", server.url, "-m", MODEL, "-o", folder)
    assert code == 0, error
    code, _, error = run("--resume", folder, "-k", 4, "--episode.max-turns", 7, "-n", 2)
    assert code == 2
    assert "samples would change: 1 → 4" in error
    assert "episode.max_turns would change: 50 → 7" in error
    assert "concurrency would" not in error
    (own / "make-apple" / "instruction.md").write_text("Make a directory named pear.\n")
    code, _, error = run("--resume", folder)
    assert code == 1
    assert "tasks make-apple changed since the run began" in error
    assert summary(folder)["passed"] == 3


def test_ctrl_c_ends_it_in_order_and_what_was_done_is_kept(
    server: ChatServer, tasks: Path, tmp_path: Path, state: Path
) -> None:
    def slowly(call: Call) -> Answer:
        time.sleep(0.2)
        return solves(call)

    server.answer = slowly
    folder = tmp_path / "run"
    process = start(tasks, "--base-url", server.url, "-m", MODEL, "-k", 50, "-n", 2, "-o", folder)
    deadline = time.monotonic() + 60
    while len(lines(folder)) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert f"go on with: python -m termrl eval --resume {folder}" in error
    found = summary(folder)
    assert found["stopped"] == "interrupted"
    assert 2 <= found["graded"] == len(lines(folder)) < 150
    assert not list(state.glob("sandboxes/*"))


def test_a_streak_exits_1_and_names_the_cause(server: ChatServer, tasks: Path, tmp_path: Path) -> None:
    server.answer = lambda call: Answer("out of memory", status=500)
    flags = ["--retry-wait-s=0", "--stop-after=4"]
    code, out, _ = run(tasks, "--base-url", server.url, "-m", MODEL, "-k", 9, "-o", tmp_path / "run", *flags)
    assert code == 1
    assert "stopped" in out and "engine_error" in out and "out of memory" in out
    assert "not made: " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["TASKS", "--env-url", "http://127.0.0.1:9", "--sandbox", "bubblewrap"], "--env-url and --sandbox"),
        ([], "no tasks given"),
        (["TASKS", "OTHER"], "one folder of tasks is expected, not 2"),
        (["TASKS", "--base-url", "http://127.0.0.1:9/v1"], "policy.model is needed"),
        (["TASKS", "--base-url", "http://me:hunter2@127.0.0.1:9/v1", "-m", "x"], "user or password"),
        (["TASKS", "-k", "0"], "samples"),
        (["TASKS", "--samplez", "2"], "unknown key"),
    ],
)
def test_bad_usage_is_refused(tasks: Path, arguments: list[str], words: str) -> None:
    code, _, error = run(*(str(tasks) if word == "TASKS" else word for word in arguments))
    assert code == 2
    assert words in error
    assert "hunter2" not in error
    assert "Traceback" not in error


def test_every_setting_has_a_line(tmp_path: Path) -> None:
    code, out, _ = run("--keys", COLUMNS="200")
    assert code == 0
    for key in ("samples", "policy.base_url", "tasks.per_family", "environment.url", "episode.opening"):
        assert any(line.startswith(key) for line in out.splitlines()), key
