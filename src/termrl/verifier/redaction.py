"""Values that a task's variables take from the host never reach a record or a log, whatever the tests print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from termrl.sandboxes.base import ExecResult
from termrl.sandboxes.output import CUT_MARK
from termrl.tasks.env import filled_from_host
from termrl.tasks.task import Task
from termrl.verifier.verdict import Verdict

MIN_CHARS = 6
"""Shorter values are no secrets, and would be found in any text."""

_LINE_CHARS = 8
_FRAGMENT = 6
_WORTH_A_MARK = 4
_DAMAGE = "\ufffd"


class Redactor:
    """Puts ``[redacted NAME]`` in place of what the host variable NAME holds.

    A value is found as it stands, line by line if it has several, and with the escapes of JSON or of a URL. Other
    encodings of it are not.
    """

    def __init__(self, task: Task) -> None:
        values = {**task.sandbox.env, **{f"solution {k}": v for k, v in task.solution_env.items()}}
        values |= {f"verifier {k}": v for k, v in task.verifier_env.items()}
        found = {form: f"[redacted {name}]" for name, v in filled_from_host(values).items() for form in _forms(v)}
        self._marks = dict(sorted(found.items(), key=lambda item: -len(item[0])))
        self._exact = re.compile("|".join(map(re.escape, self._marks))) if found else None

    def text(self, text: str, *, cut_start: bool = False, cut_end: bool = False) -> str:
        """``text`` without the values. Where it is the rest of something longer, a value may have been cut there.

        Args:
            cut_start, cut_end: what was before or after the text is missing.
        """
        if self._exact is None:
            return text
        text = self._exact.sub(lambda match: self._marks[match[0]], text)
        if cut_start:
            text = text.lstrip(_DAMAGE)
            text = self._without_edge(text, lambda form, n: text.startswith(form[-n:]), lambda n, mark: mark + text[n:])
        if cut_end:
            text = text.rstrip(_DAMAGE)
            text = self._without_edge(
                text, lambda form, n: text.endswith(form[:n]), lambda n, mark: text[: len(text) - n] + mark
            )
        return text

    def line(self, text: str) -> str:
        """A line of our own, which may quote any part of a value: parts of six characters are found too."""
        text = self.text(text)
        for form, mark in self._marks.items():
            pieces = {form[at : at + _FRAGMENT] for at in range(len(form) - _FRAGMENT + 1)}
            kept, at, inside = [], 0, False
            while at < len(text):
                if text[at : at + _FRAGMENT] in pieces:
                    kept += [] if inside else [mark]
                    at, inside = at + _FRAGMENT, True
                    while at < len(text) and text[at - _FRAGMENT + 1 : at + 1] in pieces:
                        at += 1
                else:
                    kept.append(text[at])
                    at, inside = at + 1, False
            text = "".join(kept)
        return text

    def result(self, result: ExecResult) -> ExecResult:
        """A command's result with its output redacted, also where its middle was left out."""
        if self._exact is None:
            return result
        head, mark, tail = _halves(result.output) if result.truncated_bytes else (result.output, "", "")
        output = self.text(head, cut_end=bool(mark)) + mark + self.text(tail, cut_start=bool(mark))
        return replace(result, output=output)

    def verdict(self, verdict: Verdict, *, cut_start: bool) -> Verdict:
        """A verdict with its output, detail and evidence redacted.

        Args:
            cut_start: ``output_tail`` is not the whole output.
        """
        if self._exact is None:
            return verdict
        update = {
            "output_tail": self.text(verdict.output_tail, cut_start=cut_start),
            "detail": self.line(verdict.detail),
            "signals": self._each(verdict.signals),
        }
        return verdict.model_copy(update=update)

    def _each(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self._each(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._each(item) for item in value]
        return value

    def _without_edge(self, text: str, touches: Any, without: Any) -> str:
        """Take away the longest part of any value that stands at an edge of the text."""
        parts = [(n, mark) for form, mark in self._marks.items() for n in range(1, len(form)) if touches(form, n)]
        if not parts:
            return text
        n, mark = max(parts)
        return without(n, mark if n >= _WORTH_A_MARK else "")


def _forms(value: str) -> Iterator[str]:
    """What a value may look like in a text."""
    value = value.strip()
    if len(value) < MIN_CHARS:
        return
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield quote(value, safe="")
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= _LINE_CHARS)


def _halves(output: str) -> tuple[str, str, str]:
    found = CUT_MARK.search(output)
    return (output[: found.start()], found[0], output[found.end() :]) if found else (output, "", "")
