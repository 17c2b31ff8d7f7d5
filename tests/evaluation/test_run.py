"""Whole evaluations in process: real sandboxes and tests, a real HTTP endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from termrl.errors import ConfigError, PolicyError, TaskError
from termrl.runs.files import read_jsonl
from tests.endtoend.served import served
from tests.endtoend.tiny import write_tasks
from tests.evaluation.chat_server import DONE, Answer, Call, ChatServer, bash, chat_server, gives_up, solves

Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(solves) as running:
        yield running


def lines(run: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(run / "results.jsonl"))


def test_rates_are_over_tasks_and_name_what_was_solved(server: ChatServer, evaluate: Evaluate, tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    def sometimes(call: Call) -> Answer:
        """apple always, berry in one of its three attempts, cedar never."""
        if call.turn == 0:
            tries[call.word] = tries.get(call.word, 0) + 1
        if call.word == "apple" or (call.word == "berry" and tries["berry"] == 2):
            return solves(call)
        return gives_up(call)

    server.answer = sometimes
    summary = evaluate(server.url, samples=3, concurrency=1)
    assert (summary["tasks"], summary["wanted"], summary["graded"], summary["passed"]) == (3, 9, 9, 4)
    rates = {k: round(rate["value"], 6) for k, rate in summary["pass_at"].items()}
    assert rates == {"1": round((1 + 1 / 3) / 3, 6), "2": round((1 + 2 / 3) / 3, 6), "3": round(2 / 3, 6)}
    assert summary["solved"] == ["make-apple", "make-berry"]
    assert summary["unsolved"] == ["make-cedar"]
    assert summary["by_task"]["make-berry"] == {"graded": 3, "passed": 1, "no_verdict": 0}
    assert summary["by"]["family"]["mkdir"]["pass_at"]["1"] == summary["pass_at"]["1"]
    assert summary["end_reasons"] == {"task_complete": 9}
    assert summary["zero_causes"] == {"tests_failed": 5}
    assert summary["policy"] == {"base_url": server.url, "model": "scripted"}
    assert summary["stopped"] is None


def test_every_attempt_has_one_whole_line(server: ChatServer, evaluate: Evaluate, tmp_path: Path) -> None:
    summary = evaluate(server.url, samples=2)
    found = lines(tmp_path / "run")
    assert sorted((line["task_id"], line["sample"]) for line in found) == [
        (f"make-{word}", sample) for word in ("apple", "berry", "cedar") for sample in (0, 1)
    ]
    line = found[0]
    assert (line["reward"], line["cause"], line["end_reason"]) == (1.0, None, "task_complete")
    assert [turn["kind"] for turn in line["turns"]] == ["command", "complete"]
    assert (line["prompt_tokens"], line["completion_tokens"], line["tokens"]) == (20, 10, 10)
    assert line["seconds"] > 0
    assert line["verdict"]["outcome"] == "passed"
    assert len(line["digest"]) == 64
    assert summary["completion_tokens"] == 60
    assert len({line["seed"] for line in found}) == 6


def test_kinds_of_tasks_are_told_apart(server: ChatServer, evaluate: Evaluate, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks", ("apple", "berry"))
    for word, extra in (
        ("apple", 'difficulty = "easy"\ntags = ["x"]'),
        ("berry", 'difficulty = "hard"\ntags = ["x", "y"]'),
    ):
        settings = folder / f"make-{word}" / "task.toml"
        settings.write_text(settings.read_text().replace("[metadata]\n", f'[metadata]\ncategory = "files"\n{extra}\n'))
    server.answer = lambda call: solves(call) if call.word == "apple" else gives_up(call)
    by = evaluate(server.url, tasks=folder)["by"]
    rate = {kind: {name: row["pass_at"]["1"]["value"] for name, row in table.items()} for kind, table in by.items()}
    assert rate["difficulty"] == {"easy": 1.0, "hard": 0.0}
    assert rate["tag"] == {"x": 0.5, "y": 0.0}
    assert rate["category"] == {"files": 0.5}


def test_an_attempt_without_a_verdict_is_counted_apart_and_made_again_within_the_bound(
    server: ChatServer, evaluate: Evaluate, tmp_path: Path
) -> None:
    server.answer = lambda call: Answer(drop=True) if call.word == "berry" else solves(call)
    summary = evaluate(server.url, samples=2, retries=2)
    assert sum(call.word == "berry" for call in server.calls) == 2 * 3
    assert (summary["graded"], summary["passed"], summary["no_verdict"]) == (4, 4, 2)
    assert summary["pass_at"]["2"]["value"] == 1.0
    assert summary["without_verdict"] == ["make-berry"]
    assert summary["no_verdict_causes"] == {"engine_error": 2}
    assert summary["retried_causes"] == {"engine_error": 4}
    assert summary["zero_causes"] == {}
    rewards = {line["task_id"]: line["reward"] for line in lines(tmp_path / "run")}
    assert rewards == {"make-apple": 1.0, "make-berry": None, "make-cedar": 1.0}


def test_an_attempt_that_gets_its_verdict_the_second_time_counts_once(server: ChatServer, evaluate: Evaluate) -> None:
    broken: set[str] = set()

    def once(call: Call) -> Answer:
        if call.word not in broken:
            broken.add(call.word)
            return Answer(drop=True)
        return solves(call)

    server.answer = once
    summary = evaluate(server.url)
    assert (summary["episodes"], summary["passed"], summary["no_verdict"]) == (3, 3, 0)
    assert summary["retried_causes"] == {"engine_error": 3}


def test_one_cause_in_a_row_stops_early_and_is_named(server: ChatServer, evaluate: Evaluate) -> None:
    server.answer = lambda call: Answer("the GPU is on fire", status=500)
    summary = evaluate(server.url, samples=50, stop_after=6, concurrency=2)
    assert "in a row had no verdict for one cause: engine_error" in summary["stopped"]
    assert "the GPU is on fire" in summary["stopped"]
    assert len(server.calls) <= 6 + 2
    assert summary["passed"] == summary["graded"] == 0
    assert summary["not_made"] > 100
    assert summary["pass_at"] == {}


def test_failures_among_verdicts_do_not_stop_it(server: ChatServer, evaluate: Evaluate) -> None:
    server.answer = lambda call: Answer(drop=True) if call.word == "berry" else solves(call)
    summary = evaluate(server.url, samples=4, stop_after=6, concurrency=1, retries=0)
    assert summary["stopped"] is None
    assert (summary["graded"], summary["no_verdict"]) == (8, 4)


def test_a_refused_key_stops_at_once(server: ChatServer, evaluate: Evaluate) -> None:
    server.answer = lambda call: Answer("invalid api key", status=401)
    summary = evaluate(server.url, samples=50, concurrency=2)
    assert "HTTP 401: invalid api key (check the API key)" in summary["stopped"]
    assert len(server.calls) <= 2


def test_the_rate_limit_is_no_failure_of_an_attempt(server: ChatServer, evaluate: Evaluate) -> None:
    said: list[str] = []
    full = Answer("slow down", status=429, headers={"Retry-After": "0.1"})
    server.answer = lambda call: full if call.number % 3 == 0 else solves(call)
    summary = evaluate(server.url, samples=2, concurrency=8, said=said)
    assert (summary["passed"], summary["retried_causes"]) == (6, {})
    assert any("limits the rate: 4 calls at once" in line for line in said)


def test_reasoning_goes_back_as_it_came_unless_the_endpoint_refuses_it(server: ChatServer, evaluate: Evaluate) -> None:
    def thinks(call: Call) -> Answer:
        message = {"role": "assistant", "content": solves(call).text, "reasoning_content": "```bash\nrm -rf /\n```"}
        return Answer(message=message)

    server.answer = thinks
    summary = evaluate(server.url, samples=1, tasks__include="make-apple")
    assert summary["passed"] == 1
    echoed = server.calls[1].messages[-2]
    assert echoed == {
        "role": "assistant",
        "content": bash("mkdir apple"),
        "reasoning_content": "```bash\nrm -rf /\n```",
    }


def test_reasoning_is_left_out_where_that_is_set(server: ChatServer, evaluate: Evaluate) -> None:
    message = {"role": "assistant", "content": bash("true"), "reasoning_content": "hm"}
    server.answer = lambda call: Answer(DONE) if call.turn else Answer(message=message)
    evaluate(server.url, tasks__include="make-apple", policy__echo_reasoning="false")
    assert server.calls[1].messages[-2] == {"role": "assistant", "content": bash("true")}


def test_a_native_tool_call_is_refused_by_name_and_the_policy_may_go_on(
    server: ChatServer, evaluate: Evaluate, tmp_path: Path
) -> None:
    call_ = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "mkdir apple"}'}}

    def calls_a_tool(call: Call) -> Answer:
        if call.turn == 0:
            message = {"role": "assistant", "content": None, "tool_calls": [call_]}
            return Answer(message=message, finish_reason="tool_calls")
        return Answer(bash("mkdir apple") if call.turn == 1 else DONE)

    server.answer = calls_a_tool
    summary = evaluate(server.url, tasks__include="make-apple")
    assert summary["passed"] == 1
    (line,) = lines(tmp_path / "run")
    assert [turn["error"] for turn in line["turns"]] == ["tool_call", "", ""]
    result = server.calls[1].messages[-1]
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1")
    assert "bash" in result["content"]
    assert server.calls[1].messages[-2]["tool_calls"] == [call_]


def test_a_cut_reply_is_never_run(server: ChatServer, evaluate: Evaluate, tmp_path: Path) -> None:
    server.answer = lambda call: Answer(bash("mkdir apple"), finish_reason="length")
    summary = evaluate(server.url, tasks__include="make-apple")
    assert summary["end_reasons"] == {"length": 1}
    assert (summary["graded"], summary["passed"]) == (1, 0)


def test_environments_may_be_behind_a_server(server: ChatServer, evaluate: Evaluate, tasks: Path) -> None:
    with served(tasks) as environments:
        summary = evaluate(server.url, samples=2, environment__url=environments.url)
    assert (summary["passed"], summary["graded"]) == (6, 6)


def test_prometheus_gets_the_rates_and_what_had_no_verdict(server: ChatServer, evaluate: Evaluate) -> None:
    from termrl.runs.prometheus import RunCollector

    server.answer = lambda call: Answer(drop=True) if call.word == "berry" else solves(call)
    collector = RunCollector()
    evaluate(server.url, samples=2, retries=1, watcher=collector)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }
    assert found["termrl_eval_pass_at_2",] == 1.0
    assert found["termrl_eval_pass_rate",] == 1.0
    assert found["termrl_episodes_total", "eval", "task_complete"] == 4
    assert found["termrl_missing_verdicts_total", "eval", "engine_error"] == 2
    assert found["termrl_retried_episodes_total", "eval", "engine_error"] == 2


def test_the_bundled_suite_is_written_into_the_folder(server: ChatServer, evaluate: Evaluate, tmp_path: Path) -> None:
    server.answer = gives_up
    chosen = {"tasks__families": "make-dir,remove-file", "tasks__per_family": 2}
    summary = evaluate(server.url, tasks="none", **chosen)
    assert (summary["tasks"], summary["graded"], summary["passed"]) == (4, 4, 0)
    assert len(list((tmp_path / "run" / "tasks").iterdir())) == 4


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"tasks__include": "nothing-*"}, TaskError, "no task is chosen"),
        ({"tasks": "/no/such/folder"}, TaskError, "no such folder"),
        ({"tasks": "none", "tasks__families": "make-dirr"}, TaskError, "make-dir"),
        ({"episode__opening": "first-step"}, ConfigError, "no opening"),
        ({"policy__api_key_env": "NO_SUCH"}, ConfigError, "is not set"),
    ],
)
def test_what_cannot_work_is_refused_before_a_folder_is_made(
    server: ChatServer, evaluate: Evaluate, tmp_path: Path, overrides: dict[str, Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        evaluate(server.url, **overrides)
    assert not (tmp_path / "run").exists()
    assert server.calls == []


def test_an_endpoint_where_nobody_is_is_refused_before_a_folder_is_made(evaluate: Evaluate, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"127\.0\.0\.1:9"):
        evaluate("http://127.0.0.1:9/v1")
    assert not (tmp_path / "run").exists()


def test_the_key_is_in_no_file_of_the_folder(server: ChatServer, evaluate: Evaluate, tmp_path: Path) -> None:
    key = "sk-0123456789-secret"
    server.answer = lambda call: Answer(f"I know {key}", status=500) if call.word == "berry" else solves(call)
    evaluate(server.url, policy__api_key_env="MY_KEY", environ={"MY_KEY": key})
    assert {call.headers["authorization"] for call in server.calls} == {f"Bearer {key}"}
    for folder, _, names in os.walk(tmp_path / "run"):
        for name in names:
            assert key.encode() not in Path(folder, name).read_bytes(), name
    assert any("I know ***" in line["error"] for line in lines(tmp_path / "run"))
