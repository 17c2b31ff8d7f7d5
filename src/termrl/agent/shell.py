"""Where a here-document or a quote is open in a bash script, line by line.

This is not a shell parser: it follows quotes, expansions and here-documents (POSIX Shell Command Language, 2.2,
2.6 and 2.7.4; bash's ``$'…'``, ``<<<`` and ``((…))``) just far enough to know whether the next line is shell or the
body of a here-document.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class _In(Enum):
    """What the scanner stands in; the innermost is the last of the stack."""

    COMMAND = auto()
    SUBSTITUTION = auto()  # $( … )
    SUBSHELL = auto()  # ( … ), <( … ), >( … )
    BACKTICK = auto()
    SINGLE = auto()
    ANSI = auto()  # $'…'
    DOUBLE = auto()
    ARITHMETIC = auto()  # (( … )), $(( … ))
    GROUP = auto()  # a parenthesis within arithmetic
    PARAMETER = auto()  # ${ … }
    QUOTED_PARAMETER = auto()  # ${ … } within double quotes, where ' is an ordinary character


_SHELL = frozenset({_In.COMMAND, _In.SUBSTITUTION, _In.SUBSHELL, _In.BACKTICK})
_QUOTES = frozenset({_In.SINGLE, _In.ANSI, _In.DOUBLE})
_ARITHMETIC = frozenset({_In.ARITHMETIC, _In.GROUP})
_ENDS_WORD = " \t;&|()<>"


@dataclass(frozen=True)
class Heredoc:
    """A here-document's delimiter, and how its body is read."""

    delimiter: str
    strip_tabs: bool = False
    quoted: bool = False


class ShellLines:
    """Feed a script's lines in order; ask in between what is open."""

    def __init__(self) -> None:
        self._stack = [_In.COMMAND]
        self._announced: list[Heredoc] = []
        self._open: list[Heredoc] = []
        self._body_continues = False

    @property
    def heredoc(self) -> Heredoc | None:
        """The here-document whose body the next line belongs to (or ends)."""
        return self._open[0] if self._open else None

    @property
    def announced(self) -> Heredoc | None:
        """A here-document whose body has not begun, as its line goes on (a backslash or a quotation)."""
        return self._announced[0] if self._announced else None

    @property
    def in_quote(self) -> bool:
        """A quotation mark waits for its partner."""
        return any(context in _QUOTES for context in self._stack)

    def feed(self, line: str) -> None:
        """Read one line, given without its line ending."""
        if self._open:
            self._body(line)
        else:
            self._script(line)

    def _body(self, line: str) -> None:
        heredoc = self._open[0]
        text = line.lstrip("\t") if heredoc.strip_tabs else line
        if text == heredoc.delimiter and not self._body_continues:
            del self._open[0]
            return
        trailing = len(line) - len(line.rstrip("\\"))
        self._body_continues = not heredoc.quoted and trailing % 2 == 1

    def _script(self, line: str) -> None:
        at = 0
        continued = False
        while at < len(line):
            context = self._stack[-1]
            char = line[at]
            if context is _In.SINGLE:
                end = line.find("'", at)
                if end < 0:
                    break
                self._stack.pop()
                at = end + 1
            elif char == "\\":
                continued = at == len(line) - 1
                at += 2
            elif context is _In.ANSI:
                if char == "'":
                    self._stack.pop()
                at += 1
            elif context in _SHELL and char == "#" and (at == 0 or line[at - 1] in " \t;&|()"):
                break
            elif context in _SHELL and line.startswith("<<", at):
                at = self._redirection(line, at)
            else:
                at += self._step(line, at, context)
        if self._announced and not continued and self._stack[-1] in _SHELL:
            self._open, self._announced = self._announced, []
            self._body_continues = False

    def _step(self, line: str, at: int, context: _In) -> int:
        """Follow one character (or opener); returns how many were read."""
        char = line[at]
        if char == "$":
            return self._dollar(line, at, context)
        if char == "`":
            self._backtick()
        elif char == '"':
            if context is _In.DOUBLE:
                self._stack.pop()
            else:
                self._stack.append(_In.DOUBLE)
        elif char == "'":
            if context in _SHELL or context is _In.PARAMETER:
                self._stack.append(_In.SINGLE)
        elif char == "}":
            if context in (_In.PARAMETER, _In.QUOTED_PARAMETER):
                self._stack.pop()
        elif char == "(":
            return self._open_parenthesis(line, at, context)
        elif char == ")":
            return self._close_parenthesis(line, at, context)
        return 1

    def _dollar(self, line: str, at: int, context: _In) -> int:
        if line.startswith("$((", at):
            self._stack.append(_In.ARITHMETIC)
            return 3
        if line.startswith("$(", at):
            self._stack.append(_In.SUBSTITUTION)
            return 2
        if line.startswith("${", at):
            quoted = context in (_In.DOUBLE, _In.QUOTED_PARAMETER)
            self._stack.append(_In.QUOTED_PARAMETER if quoted else _In.PARAMETER)
            return 2
        if line.startswith("$'", at) and (context in _SHELL or context is _In.PARAMETER):
            self._stack.append(_In.ANSI)
            return 2
        return 1

    def _backtick(self) -> None:
        if _In.BACKTICK in self._stack:
            while self._stack.pop() is not _In.BACKTICK:
                pass
        else:
            self._stack.append(_In.BACKTICK)

    def _open_parenthesis(self, line: str, at: int, context: _In) -> int:
        if context in _ARITHMETIC:
            self._stack.append(_In.GROUP)
        elif context in _SHELL:
            if line.startswith("((", at):
                self._stack.append(_In.ARITHMETIC)
                return 2
            self._stack.append(_In.SUBSHELL)
        return 1

    def _close_parenthesis(self, line: str, at: int, context: _In) -> int:
        if context is _In.ARITHMETIC:
            self._stack.pop()
            return 2 if line.startswith("))", at) else 1
        if context in (_In.GROUP, _In.SUBSTITUTION, _In.SUBSHELL):
            self._stack.pop()
        return 1

    def _redirection(self, line: str, at: int) -> int:
        """Read ``<<``, ``<<-`` or ``<<<`` at ``at``; returns where to go on."""
        if line.startswith("<<<", at):
            return at + 3
        at += 2
        strip_tabs = line.startswith("-", at)
        at += strip_tabs
        while at < len(line) and line[at] in " \t":
            at += 1
        delimiter, quoted, end = _word(line, at)
        if end > at:
            self._announced.append(Heredoc(delimiter, strip_tabs, quoted))
        return end


def _word(line: str, at: int) -> tuple[str, bool, int]:
    """The shell word at ``at`` with its quotes removed, whether it had any, and where it ends."""
    text: list[str] = []
    quoted = False
    while at < len(line) and line[at] not in _ENDS_WORD:
        char = line[at]
        if char == "\\":
            quoted = True
            text.append(line[at + 1 : at + 2])
            at += 2
        elif char in "'\"":
            end = line.find(char, at + 1)
            if end < 0:
                end = len(line)
            quoted = True
            text.append(line[at + 1 : end])
            at = end + 1
        else:
            text.append(char)
            at += 1
    return "".join(text), quoted, min(at, len(line))
