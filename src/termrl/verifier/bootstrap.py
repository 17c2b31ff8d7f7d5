"""What a task's own tests say: whether they download, and whether a download or an installation failed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_FAILURES = re.compile(
    r"could not resolve host"
    r"|temporary failure (?:in name resolution|resolving)"
    r"|name or service not known"
    r"|network is unreachable"
    r"|failed to establish a new connection"
    r"|curl: \((?:5|6|7|22|28|35|52|56)\)"
    r"|wget: unable to resolve"
    r"|unable to connect to [\w.-]+:"
    r"|E: (?:Failed to fetch|Unable to fetch some archives|Unable to locate package)"
    r"|Could not connect to \S+"
    r"|Could not find a version that satisfies the requirement"
    r"|No matching distribution found for"
    r"|(?:error: )?(?:Failed to (?:fetch|download)|Request failed after \d+ retries)"
    r"|(?:HTTP(?:/[\d.]+)?|status(?: code)?|error)[: ]+(?:429|502|503|504)\b"
    r"|429 Too Many Requests|toomanyrequests|rate limit exceeded"
    r"|Connection (?:timed out|reset by peer) .{0,80}(?:http|download)"
    r"|Read timed out\.",
    re.IGNORECASE,
)

_DOWNLOADERS = re.compile(
    rb"(?<![\w./-])(?:curl|wget|apt|apt-get|apk|dnf|yum|pip3?|uv|uvx|npm|npx|conda|cargo|git\s+clone)(?![\w-])"
    rb"|https?://"
)

_SCRIPT_SUFFIXES = frozenset({".sh", ".bash", ".py", ".txt", ".toml", ""})
_MAX_SCRIPT_BYTES = 256 * 1024


def bootstrap_failure(output: str) -> str | None:
    """The line of ``output`` that says a download or installation failed, or ``None``."""
    found = _FAILURES.search(output)
    if found is None:
        return None
    start = output.rfind("\n", 0, found.start()) + 1
    end = output.find("\n", found.end())
    return output[start : end if end >= 0 else len(output)].strip()[:200]


def downloads_in(tests: Path) -> bool:
    """Whether the task's own tests fetch anything.

    Where they do not, a message about the network in their output cannot be the infrastructure's: it is text
    that the policy made the tests print.
    """
    return any(_DOWNLOADERS.search(text) for text in _scripts(tests))


def mentions(tests: Path, name: bytes) -> bool:
    """Whether ``name`` stands anywhere in the task's own tests."""
    return any(name in text for text in _scripts(tests))


def _scripts(tests: Path) -> Iterator[bytes]:
    for path in sorted(tests.rglob("*")):
        if path.suffix in _SCRIPT_SUFFIXES and path.is_file():
            with path.open("rb") as file:
                yield file.read(_MAX_SCRIPT_BYTES)
