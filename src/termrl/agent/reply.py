r"""What the policy said: one bash block to run, ``TASK_COMPLETE``, or a format error.

The rules, over the final content only (a leading ``<think>…</think>`` is never read):

- Fences are CommonMark's (spec 0.31, 4.5): at least three backticks or tildes after at most three spaces; closed by a
  line of at least as many of the same character and nothing else. A fence that is never closed is a format error.
- A *command* is a block whose info string begins with ``bash``, ``sh`` or ``shell``. Blocks of other languages are
  illustration: nothing in them counts, and they do not disturb a command beside them.
- Within a command, a fence line in the body of an open here-document is text, so that a file that itself holds
  fences can be written.
- Exactly one command runs. None, several, an empty one, or one that ends within a quotation is a format error.
- ``TASK_COMPLETE`` outside any block ends the episode; with a command beside it the command runs first. Beside a
  command it must be a sentence of its own, so that a plan that mentions the word does not end the episode.

``lenient`` takes the first closed block, whatever its language and however many follow, does not look at quotation
marks, and lets ``TASK_COMPLETE`` count anywhere outside a block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from termrl.agent.shell import ShellLines

COMMAND_LANGUAGES = frozenset({"bash", "sh", "shell"})
TASK_COMPLETE = "TASK_COMPLETE"

_FENCE = re.compile(r"^( {0,3})(`{3,}|~{3,})(.*)$", re.DOTALL)
_WORD = re.compile(rf"(?<!\w){TASK_COMPLETE}(?!\w)")
_MARKUP = str.maketrans("", "", "`*\"'“”‘’")
_SENTENCE = re.compile(rf"(?:^\W*|[^\w\s,(\[{{<]\s+){TASK_COMPLETE}\s*(?:$|[^\w\s])")
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"

ReplyKind = Literal["command", "complete", "command_complete", "format_error"]


class FormatError(StrEnum):
    """Why a reply could not be acted on (closed list)."""

    NO_COMMAND = "no_command"
    OTHER_LANGUAGE = "other_language"
    SEVERAL_COMMANDS = "several_commands"
    EMPTY_COMMAND = "empty_command"
    UNCLOSED_FENCE = "unclosed_fence"
    UNCLOSED_HEREDOC = "unclosed_heredoc"
    UNCLOSED_QUOTE = "unclosed_quote"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True)
class ParsedReply:
    """What to do with a reply.

    Attributes:
        kind: what the reply is; ``command`` and ``command_complete`` have a ``command``.
        command: the script to run, lines joined by ``\\n``, no final newline.
        complete: the policy says that it is done.
        error: set exactly when ``kind`` is ``format_error``.
        detail: the delimiter of an unclosed here-document.
    """

    kind: ReplyKind
    command: str | None = None
    complete: bool = False
    error: FormatError | None = None
    detail: str = ""


@dataclass
class _Block:
    """One fenced block, open or closed."""

    indent: int
    fence: str
    language: str
    lines: list[str] = field(default_factory=list)
    shell: ShellLines | None = None

    def closed_by(self, line: str) -> bool:
        if self.shell is not None and self.shell.heredoc is not None:
            return False
        match = _FENCE.match(line)
        return (
            match is not None
            and match[2][0] == self.fence[0]
            and len(match[2]) >= len(self.fence)
            and not match[3].strip(" \t")
        )

    def add(self, line: str) -> None:
        spaces = len(line) - len(line.lstrip(" "))
        line = line[min(spaces, self.indent) :]
        self.lines.append(line)
        if self.shell is not None:
            self.shell.feed(line)


class _Scanner:
    """The line scanner that :func:`parse_reply` and :class:`FenceScanner` share."""

    def __init__(self, lenient: bool) -> None:
        self._lenient = lenient
        self.prose: list[str] = []
        self.blocks: list[_Block] = []
        self.open: _Block | None = None

    def line(self, line: str) -> None:
        if self.open is not None:
            if self.open.closed_by(line):
                self.blocks.append(self.open)
                self.open = None
            else:
                self.open.add(line)
            return
        match = _FENCE.match(line)
        if match is None or (match[2][0] == "`" and "`" in match[3]):
            self.prose.append(line)
            return
        words = match[3].split(None, 1)
        language = words[0].lower() if words else ""
        shell = ShellLines() if self._lenient or language in COMMAND_LANGUAGES else None
        self.open = _Block(len(match[1]), match[2], language, shell=shell)

    def is_command(self, block: _Block) -> bool:
        return self._lenient or block.language in COMMAND_LANGUAGES

    @property
    def commands(self) -> list[_Block]:
        return [block for block in self.blocks if self.is_command(block)]


def final_content(text: str) -> str:
    """``text`` without reasoning that an endpoint left in it.

    Reasoning is what a leading ``<think>`` opens, or, where the chat template opened it in the prompt, all before
    the first ``</think>``. Reasoning that never closes leaves nothing.
    """
    if text.lstrip().startswith(_THINK_OPEN):
        return text.partition(_THINK_CLOSE)[2]
    before, close, after = text.partition(_THINK_CLOSE)
    return after if close and _THINK_OPEN not in before else text


def parse_reply(text: str, *, lenient: bool = False) -> ParsedReply:
    """Decide what a finished reply asks for (the rules stand at the top of this module)."""
    scanner = _Scanner(lenient)
    for line in final_content(text).split("\n"):
        scanner.line(line.removesuffix("\r"))
    commands = scanner.commands
    prose = scanner.prose

    if scanner.open is not None and not (lenient and commands):
        heredoc = scanner.open.shell.heredoc if scanner.open.shell is not None else None
        if heredoc is not None:
            return _error(FormatError.UNCLOSED_HEREDOC, heredoc.delimiter)
        return _error(FormatError.UNCLOSED_FENCE)
    if not commands:
        if any(_WORD.search(line) for line in prose):
            return ParsedReply("complete", complete=True)
        return _error(FormatError.OTHER_LANGUAGE if scanner.blocks else FormatError.NO_COMMAND)
    if len(commands) > 1 and not lenient:
        return _error(FormatError.SEVERAL_COMMANDS)
    block = commands[0]
    command = "\n".join(block.lines)
    if not command.strip():
        return _error(FormatError.EMPTY_COMMAND)
    if not lenient and block.shell is not None:
        if block.shell.in_quote:
            return _error(FormatError.UNCLOSED_QUOTE)
        if block.shell.announced is not None:
            return _error(FormatError.UNCLOSED_HEREDOC, block.shell.announced.delimiter)
    if any(_says_complete(line, lenient) for line in prose):
        return ParsedReply("command_complete", command, complete=True)
    return ParsedReply("command", command)


def _error(error: FormatError, detail: str = "") -> ParsedReply:
    return ParsedReply("format_error", error=error, detail=detail)


def _says_complete(line: str, lenient: bool) -> bool:
    if lenient:
        return _WORD.search(line) is not None
    return _SENTENCE.search(line.translate(_MARKUP).strip()) is not None


class FenceScanner:
    """Says, as a reply grows, when it holds one closed command block.

    Each character is looked at once, so feeding a reply piece by piece costs as much as feeding it whole.

    Args:
        lenient: any language counts.
        in_reasoning: the prompt ended within ``<think>``: nothing counts before ``</think>``.
    """

    def __init__(self, *, lenient: bool = False, in_reasoning: bool = False) -> None:
        self._scanner = _Scanner(lenient)
        self._partial: list[str] = []
        self._reasoning = in_reasoning
        self._started = in_reasoning
        self.closed = False

    def feed(self, piece: str) -> bool:
        """Take the next piece; true once a command block and the newline after its closing fence have come."""
        if self.closed or "\n" not in piece:
            self._partial.append(piece)
            return self.closed
        *lines, rest = ("".join(self._partial) + piece).split("\n")
        self._partial = [rest]
        for line in lines:
            self._line(line.removesuffix("\r"))
            if self._scanner.commands:
                self.closed = True
                break
        return self.closed

    def _line(self, line: str) -> None:
        if not self._started and line.strip():
            self._started = True
            self._reasoning = line.lstrip().startswith(_THINK_OPEN)
        if self._reasoning:
            _, close, line = line.partition(_THINK_CLOSE)
            if not close:
                return
            self._reasoning = False
        self._scanner.line(line)


def has_closed_command(text: str) -> bool:
    """Whether a reply that begins with ``text`` already holds one closed command block, with the newline after it."""
    return FenceScanner().feed(text)
