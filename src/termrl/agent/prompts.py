"""What the policy is told: openings, and how outputs and format errors go back to it.

Openings solve no task of any bundled family. Their demonstrations are chat turns in the very format that
:func:`observation_text` produces, since a small model learns the format from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from termrl.agent.reply import FormatError
from termrl.agent.types import Message, Opening
from termrl.errors import ConfigError

NO_OUTPUT = "(no output)"


def _chat(system: str, *turns: str) -> tuple[Message, ...]:
    """A system message, then user and assistant in turn."""
    messages: list[Message] = [{"role": "system", "content": system}]
    for index, content in enumerate(turns):
        messages.append({"role": "assistant" if index % 2 else "user", "content": content})
    return tuple(messages)


def _bash(script: str) -> str:
    return f"```bash\n{script}\n```"


def _first_steps() -> Opening:
    return Opening(
        _chat(
            "You solve tasks in a Linux shell. Answer with one bash block, or with TASK_COMPLETE when all is done.",
            "Print the current directory.",
            _bash("pwd"),
            "/app",
            "TASK_COMPLETE",
            "Run cat chair.txt, then count the words of the file that it names.",
            _bash("cat chair.txt"),
            "blue.md",
            _bash("wc -w blue.md"),
            "12 blue.md",
            "TASK_COMPLETE",
            "Make a link named table.txt to the file bread.txt.",
            _bash("ln -s bread.txt table.txt"),
            NO_OUTPUT,
            "TASK_COMPLETE",
            "Run cat horse.txt, then greet the person that it shows.",
            _bash("cat horse.txt"),
            "river",
            _bash("echo hello river"),
            "hello river",
            "TASK_COMPLETE",
            "Run cat window.txt, then show the size of the file that it names.",
            _bash("cat window.txt"),
            "lemon.md",
            _bash("wc -c lemon.md"),
            "31 lemon.md",
            "TASK_COMPLETE",
        )
    )


_TERMINAL_BENCH = """\
You solve tasks in a real Linux machine through its shell. You act in turns. In each turn, think briefly, then do
exactly one of two things:

1. Run a command: write exactly one fenced block, such as

```bash
ls -la
```

2. When the task is done and you have checked it, write TASK_COMPLETE outside any block, on a line of its own.

How commands run:
- Every command is a fresh, non-interactive `bash -c` that starts in the task's working directory. `cd`, variables,
  functions and activated environments do not persist from one command to the next: chain with `&&`, or use absolute
  paths. Files and background processes do persist.
- There is no terminal and no standard input. Programs that ask, page or open an editor will not work: pass flags such
  as `-y`, and write files with here-documents.
- A command that runs too long is killed with all it started. Run long work in the background with its output in a
  file (`nohup make > make.log 2>&1 &`) and look at the file later.
- You get back standard output and standard error together. Long output is cut in the middle. The exit status is shown
  when it is not 0.
- A block may hold several lines; it runs as one script. Only one block per turn is run, and only one marked bash.

The task is judged by the state in which you leave the machine, not by what you say. Nobody answers questions: make
reasonable assumptions and go on until the task is done."""


def _terminal_bench() -> Opening:
    return Opening(_chat(_TERMINAL_BENCH), instruction_template="# Task\n\n{instruction}")


_OPENINGS: dict[str, Callable[[], Opening]] = {"first-steps": _first_steps, "terminal-bench": _terminal_bench}
OPENINGS = tuple(_OPENINGS)


def opening(name: str) -> Opening:
    """The opening called ``name`` (one of :data:`OPENINGS`).

    ``first-steps`` is short, with five demonstrations, for models of a few hundred million parameters;
    ``terminal-bench`` states the rules in full, without demonstrations, for models that follow instructions.

    Raises:
        ConfigError: no opening of that name.
    """
    if name not in _OPENINGS:
        close = difflib.get_close_matches(name, OPENINGS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"one of: {', '.join(OPENINGS)}"
        raise ConfigError(f"opening: no opening is called {name!r}", hint=hint)
    return _OPENINGS[name]()


def first_messages(opening: Opening, instruction: str) -> list[Message]:
    """The conversation before the policy's first turn."""
    content = opening.instruction_template.replace("{instruction}", instruction)
    return [*opening.messages, {"role": "user", "content": content}]


def cut_middle(text: str, limit: int) -> str:
    """``text`` with at most ``limit`` of its characters: head and tail, with a mark that says how many are gone."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters cut ...]\n{text[len(text) - tail :]}"


def observation_text(
    output: str,
    *,
    limit: int,
    exit_code: int | None = 0,
    timed_out: bool = False,
    timeout_s: float | None = None,
    background: int = 0,
    oom: bool = False,
    error: str = "",
) -> str:
    """The user turn that answers a command; never empty, since chat endpoints refuse empty content.

    Args:
        output: what the command printed.
        limit: characters of ``output`` that are kept, head and tail.
        exit_code: shown when it is neither 0 nor ``None``.
        timeout_s: seconds after which the command was killed, when ``timed_out`` and known.
        background: processes that the command left running.
        oom: something in it was killed for memory.
        error: why the command could not be run at all.
    """
    text = output.encode("utf-8", "replace").decode().rstrip()
    notes: list[str] = []
    if error:
        notes.append(f"(error: {error.strip()})")
    if timed_out:
        after = f" after {timeout_s:g} s" if timeout_s is not None else ""
        notes.append(f"(timed out{after}; the command was killed)")
    elif exit_code:
        notes.append(f"(exit status {exit_code})")
    if oom:
        notes.append("(out of memory: a process was killed)")
    if background:
        notes.append(f"({background} background process{'es' if background > 1 else ''} running)")
    body = cut_middle(text, limit) if text else "" if error else NO_OUTPUT
    return "\n".join(part for part in (body, *notes) if part)


_FORMAT_ERRORS: dict[FormatError, str] = {
    FormatError.NO_COMMAND: "Your reply held no command.",
    FormatError.OTHER_LANGUAGE: "Your reply held a block, but none that is marked bash.",
    FormatError.SEVERAL_COMMANDS: "Your reply held more than one bash block; none was run.",
    FormatError.EMPTY_COMMAND: "Your bash block was empty.",
    FormatError.UNCLOSED_FENCE: "Your block was never closed; nothing was run.",
    FormatError.UNCLOSED_HEREDOC: "Your here-document never ended (no line {detail} of its own); nothing was run.",
    FormatError.UNCLOSED_QUOTE: "Your command ended within a quotation; nothing was run.",
    FormatError.TOOL_CALL: "There are no tools to call; nothing was run.",
}
_HOW = "Answer with exactly one block like this:\n```bash\ncommand\n```\nor with TASK_COMPLETE when the task is done."


def format_error_text(error: FormatError, detail: str = "") -> str:
    """The user turn that answers a reply which could not be acted on."""
    return f"{_FORMAT_ERRORS[error].replace('{detail}', detail)} {_HOW}"
