"""What a task's variables take from the host stands in no verdict, no log and no record, wherever it was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from termrl.environment.protocol import Action
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.sandboxes.base import ExecResult, SandboxProvider
from termrl.tasks.task import Task
from termrl.verifier.oracle import run_solution
from termrl.verifier.redaction import Redactor
from termrl.verifier.verdict import Verdict
from termrl.verifier.verify import verify
from tests.verifier.tiny import handed_over, sandbox_of, tiny_task

VALUE = "s3cr3t/Hällo+5f1c9a7e"
MARK = "[redacted TERMRL_TEST_KEY]"
KEYS: dict[str, Any] = {"verifier_env": {"KEY": "${TERMRL_TEST_KEY}"}, "solution_env": {"KEY": "${TERMRL_TEST_KEY}"}}
REWARD = "\necho 1 > /logs/verifier/reward.txt\n"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMRL_TEST_KEY", VALUE)


def parts_of(text: str, length: int = 4) -> list[str]:
    """Parts of the value that stand in a text."""
    return [part for at in range(len(VALUE) - length + 1) if (part := VALUE[at : at + length]) in text]


async def verdict_of(provider: SandboxProvider, folder: Path, test: str, **fields: Any) -> Verdict:
    task = tiny_task(folder, test=test, **{**KEYS, **fields})
    async with handed_over(provider, task) as (sandbox, baseline):
        return await verify(sandbox, task, baseline=baseline)


async def test_a_value_that_the_tests_print_is_named_instead(provider: SandboxProvider, tmp_path: Path) -> None:
    verdict = await verdict_of(provider, tmp_path, 'echo "key: $KEY."; echo ${#KEY}' + REWARD)
    assert verdict.output_tail == f"key: {MARK}.\n{len(VALUE)}\n"
    assert verdict.raw_reward == 1


@pytest.mark.parametrize("shown", range(1, len(VALUE.encode())))
def test_a_value_that_a_cut_went_through_shows_no_part_at_either_edge(shown: int, tmp_path: Path) -> None:
    redactor = Redactor(tiny_task(tmp_path, **KEYS))
    raw = VALUE.encode()
    end = redactor.text("before " + raw[:shown].decode(errors="replace"), cut_end=True)
    start = redactor.text(raw[-shown:].decode(errors="replace") + " after", cut_start=True)
    assert end in (f"before {MARK}", "before ") and start in (f"{MARK} after", " after")


async def test_the_tail_of_a_long_output_begins_with_no_part_of_a_value(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    # the last 8192 bytes begin within the value, wherever that is
    for shown in (3, 9, len(VALUE.encode()) - 1):
        test = f'printf %s "$KEY"; head -c {8192 - shown} /dev/zero | tr "\\0" .' + REWARD
        verdict = await verdict_of(provider, tmp_path / str(shown), test)
        assert len(verdict.output_tail) > 8000 and not parts_of(verdict.output_tail, 3)


async def test_a_time_limit_does_not_show_it(provider: SandboxProvider, tmp_path: Path) -> None:
    verdict = await verdict_of(provider, tmp_path, 'echo "$KEY"; sleep 60', verifier_timeout_s=1.0)
    assert verdict.output_tail == f"{MARK}\n" and verdict.outcome == "no_verdict"


@pytest.mark.parametrize(
    "test",
    [
        'echo "$KEY" > /logs/verifier/reward.txt',
        'echo "x${KEY:0:14}" > /logs/verifier/reward.txt',
        'echo "{\\"$KEY\\": true}" > /logs/verifier/reward.json',
        'echo "curl: (6) Could not resolve host: https://$KEY@host"',
    ],
)
async def test_a_detail_quotes_no_part_of_it(provider: SandboxProvider, tmp_path: Path, test: str) -> None:
    verdict = await verdict_of(provider, tmp_path, test)
    assert verdict.detail and MARK in verdict.detail
    assert not parts_of(verdict.model_dump_json(), 6)


async def test_the_solutions_output_is_redacted_also_around_what_was_left_out(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    # 64 KiB are kept: the first half ends and the second begins within a value
    half = 32 * 1024
    solution = (
        f'pad() {{ head -c $1 /dev/zero | tr "\\0" .; }}; pad {half - 8}; printf %s "$KEY"; pad 9999; '
        f'printf %s "$KEY"; pad {half - 8}; exit 7'
    )
    task = tiny_task(tmp_path, solution=solution, **KEYS)
    async with sandbox_of(provider, task) as sandbox:
        result = await run_solution(sandbox, task)
    assert result.exit_code == 7 and result.truncated_bytes > 9000
    assert not parts_of(result.output) and MARK in result.output


async def test_an_observation_carries_no_value_anywhere(provider: SandboxProvider, tmp_path: Path) -> None:
    task = tiny_task(tmp_path, test='echo "$KEY"; echo 0 > /logs/verifier/reward.txt', **KEYS)
    environment = LocalEnvironmentFactory({task.id: task}, provider).create()
    try:
        await environment.reset(task.id)
        observation = await environment.step(Action(action_type="evaluate"))
    finally:
        await environment.close()
    assert observation.reward == 0 and MARK in observation.output
    assert not parts_of(observation.model_dump_json() + environment.state().model_dump_json())


def task_with(folder: Path, template: str) -> Task:
    return tiny_task(folder, verifier_env={"KEY": template})


def test_every_form_of_a_value_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMRL_TEST_KEY", 'first "line" here\nsecond line/here\n')
    redactor = Redactor(task_with(tmp_path, "${TERMRL_TEST_KEY}"))
    value = 'first "line" here\nsecond line/here'
    for form in (value, json.dumps(value), "first%20%22line%22%20here%0Asecond%20line%2Fhere", "x second line/here y"):
        assert "second" not in redactor.text(form) and MARK in redactor.text(form)


@pytest.mark.parametrize(
    ("value", "template"),
    [("tiny", "${TERMRL_TEST_KEY}"), ("long enough", "x ${TERMRL_TEST_KEY}"), ("long enough", "long enough")],
)
def test_short_values_and_the_tasks_own_words_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, template: str
) -> None:
    monkeypatch.setenv("TERMRL_TEST_KEY", value)
    redactor = Redactor(task_with(tmp_path, template))
    assert redactor.text(f"it is {value}.", cut_start=True, cut_end=True) == f"it is {value}."


def test_a_default_of_the_task_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERMRL_TEST_KEY")
    assert Redactor(task_with(tmp_path, "${TERMRL_TEST_KEY:-the default}")).text("the default") == "the default"


def test_output_without_a_value_is_left_as_it_is(tmp_path: Path) -> None:
    redactor = Redactor(tiny_task(tmp_path, **KEYS))
    result = ExecResult(output="nothing to see\ufffd", exit_code=0)
    assert redactor.result(result) == result
    assert redactor.line("a plain line") == "a plain line"
