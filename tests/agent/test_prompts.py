"""Openings and what goes back to the policy."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from termrl.agent.prompts import OPENINGS, cut_middle, format_error_text, observation_text, opening
from termrl.agent.reply import FormatError, parse_reply
from termrl.errors import ConfigError
from termrl.tasks.generate import FAMILIES, VOCABULARY
from termrl.tasks.generate.suite import instances


@pytest.mark.parametrize("name", OPENINGS)
def test_an_opening_is_a_system_message_then_user_and_assistant_in_turn(name: str) -> None:
    roles = [message["role"] for message in opening(name).messages]
    assert roles[0] == "system"
    assert roles[1:] == ["user", "assistant"] * (len(roles) // 2)
    assert all(message["content"].strip() for message in opening(name).messages)
    assert "{instruction}" in opening(name).instruction_template


def demonstrations() -> list[list[tuple[str, str]]]:
    """The (said, answered) pairs of each demonstrated task, split where TASK_COMPLETE ends it."""
    tasks: list[list[tuple[str, str]]] = [[]]
    turns = [message["content"] for message in opening("first-steps").messages[1:]]
    for said, answered in zip(turns[::2], turns[1::2], strict=True):
        tasks[-1].append((said, answered))
        if parse_reply(answered).complete:
            tasks.append([])
    assert tasks.pop() == []
    return tasks


def commands_of(task: list[tuple[str, str]]) -> list[str]:
    return [command for _, answered in task if (command := parse_reply(answered).command) is not None]


def test_every_demonstration_ends_in_the_word_and_several_need_their_first_output() -> None:
    tasks = demonstrations()
    assert len(tasks) == 5
    looks_first = [
        task for task in tasks if len(task) == 3 and task[1][0] in commands_of(task)[1] and task[1][0] not in task[0][0]
    ]
    assert len(looks_first) == 3


def test_demonstrated_outputs_are_what_the_commands_print(tmp_path: Path) -> None:
    files = {"chair.txt": "blue.md", "horse.txt": "river", "window.txt": "lemon.md", "bread.txt": "baked clay"}
    files |= {"blue.md": "one two three four five six seven eight nine ten eleven twelve", "lemon.md": "x" * 30}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    for task in demonstrations():
        for (_, answered), (said, _) in itertools.pairwise(task):
            command = parse_reply(answered).command
            assert command is not None
            done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
            output = done.stdout.replace(str(tmp_path), "/app")
            assert observation_text(output, limit=4000, exit_code=done.returncode) == said


def test_demonstrations_solve_no_family_of_the_default_run() -> None:
    config = tomllib.loads((Path(__file__).parents[2] / "examples" / "first-steps.toml").read_text())
    evaluated = [*config["tasks"]["families"], *config["evaluation"]["untrained_families"]]
    solving = {
        command.split()[0]
        for name in evaluated
        for instance in instances(FAMILIES[name], "eval", 3, 0)
        for command in instance.solution
    }
    shown = {command.split()[0] for task in demonstrations() for command in commands_of(task)}
    assert shown & solving == {"cat"}


def test_demonstrations_share_no_word_with_the_tasks() -> None:
    text = " ".join(said for task in demonstrations() for said, _ in task[:1])
    names = re.findall(r"(\w+)\.(?:txt|md)", " ".join([text, *(c for t in demonstrations() for c in commands_of(t))]))
    assert names
    assert not set(names) & set(VOCABULARY)


def test_the_first_steps_opening_is_short() -> None:
    assert sum(len(message["content"]) for message in opening("first-steps").messages) < 1200


def test_a_mistyped_opening_is_named_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        opening("first-step")
    assert caught.value.hint == "did you mean 'first-steps'?"


@pytest.mark.parametrize("error", FormatError)
def test_every_format_error_has_a_text_that_shows_the_format(error: FormatError) -> None:
    text = format_error_text(error, "EOF")
    assert "```bash\ncommand\n```" in text
    assert "TASK_COMPLETE" in text
    assert "{detail}" not in text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"output": "a\n"}, "a"),
        ({"output": "  a\n b\n\n"}, "  a\n b"),
        ({"output": ""}, "(no output)"),
        ({"output": "\n \n"}, "(no output)"),
        ({"output": "no such file\n", "exit_code": 2}, "no such file\n(exit status 2)"),
        ({"output": "", "exit_code": 1}, "(no output)\n(exit status 1)"),
        ({"output": "", "exit_code": None, "timed_out": True}, "(no output)\n(timed out; the command was killed)"),
        (
            {"output": "a", "timed_out": True, "timeout_s": 20.0, "exit_code": 137},
            "a\n(timed out after 20 s; the command was killed)",
        ),
        ({"output": "a", "background": 1}, "a\n(1 background process running)"),
        ({"output": "a", "background": 2}, "a\n(2 background processes running)"),
        (
            {"output": "a", "exit_code": 137, "oom": True},
            "a\n(exit status 137)\n(out of memory: a process was killed)",
        ),
        ({"output": "", "error": "the command holds a NUL byte"}, "(error: the command holds a NUL byte)"),
        ({"output": "a\udc80b"}, "a?b"),
    ],
)
def test_an_output_goes_back_with_what_the_policy_must_know(given: dict[str, object], text: str) -> None:
    assert observation_text(limit=4000, **given) == text  # type: ignore[arg-type]


@given(st.text(max_size=300), st.integers(1, 120))
def test_a_cut_keeps_head_and_tail_and_says_how_much_is_gone(text: str, limit: int) -> None:
    cut = cut_middle(text, limit)
    if len(text) <= limit:
        assert cut == text
        return
    mark = f"\n[... {len(text) - limit} characters cut ...]\n"
    head, tail = cut[: (limit + 1) // 2], cut[(limit + 1) // 2 + len(mark) :]
    assert cut == head + mark + tail
    assert (text.startswith(head), text.endswith(tail), len(head) + len(tail)) == (True, True, limit)


@given(st.text(max_size=200), st.integers(1, 50), st.one_of(st.none(), st.integers(0, 255)), st.booleans())
def test_an_observation_is_never_empty_and_always_encodes(
    output: str, limit: int, exit_code: int | None, timed_out: bool
) -> None:
    text = observation_text(output, limit=limit, exit_code=exit_code, timed_out=timed_out)
    assert text.strip()
    text.encode()
