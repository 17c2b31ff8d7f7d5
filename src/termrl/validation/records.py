"""The nouns of validation: an attempt, what a task's attempts show, the report over all tasks."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from termrl.errors import TaskError, TermrlError
from termrl.runs.files import write_atomically
from termrl.verifier.verdict import Outcome, Verdict

REPORT_VERSION = 1

Kind = Literal["oracle", "nop"]


class Status(StrEnum):
    """What is known about a task (closed list); all but the first make it unsound."""

    SOUND = "sound"
    """Each time, the solution passed and doing nothing failed."""
    ORACLE_FAILS = "oracle_fails"
    """The tests fail after the task's own solution."""
    PASSES_UNTOUCHED = "passes_untouched"
    """The tests pass although nothing was done."""
    FLAKY = "flaky"
    """The same attempt gives different verdicts."""
    TESTS_CANNOT_PASS = "tests_cannot_pass"
    """The solution does not pass, and a test file cannot even be read as a program."""
    NO_TEST_VERDICT = "no_test_verdict"
    """The tests end without a reward, hang, or write what is no reward."""
    NO_SOLUTION = "no_solution"
    """There is no solution/solve.sh to try."""
    BOOTSTRAP_FAILED = "bootstrap_failed"
    """The tests could not download or install what they need: nothing is known."""
    IMAGE_UNAVAILABLE = "image_unavailable"
    """The image could not be pulled or built: nothing is known."""
    INFRASTRUCTURE = "infrastructure"
    """The sandbox failed, again and again: nothing is known."""
    REFUSED = "refused"
    """The sandbox backend cannot run the task as it is meant."""
    BROKEN = "broken"
    """The folder is no usable task."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Solved(_Record):
    """How solve.sh ended."""

    exit_code: int | None
    timed_out: bool = False
    output_tail: str = ""


class Attempt(_Record):
    """One sandbox in which the solution was run, or nothing, and then the tests.

    Attributes:
        digest: of the task folder; ``sandbox``: the backend; both say what the attempt is about.
        verdict: what the tests said; ``None`` if the task was refused.
        refusal: why the backend, or this machine, cannot run the task at all.
        retried: causes of earlier tries that the machine failed.
        start_s, solve_s, verify_s: seconds of the last try.
    """

    task_id: str
    digest: str
    sandbox: str
    kind: Kind
    round: int
    verdict: Verdict | None = None
    refusal: str = ""
    solved: Solved | None = None
    retried: tuple[str, ...] = ()
    start_s: float = 0.0
    solve_s: float = 0.0
    verify_s: float = 0.0

    @property
    def scored(self) -> bool:
        """Whether the tests gave a verdict."""
        return self.verdict is not None and self.verdict.outcome is not Outcome.NO_VERDICT


class TaskReport(_Record):
    """What the attempts show about one task.

    Attributes:
        oracle, nop: raw rewards by round; ``None`` where there was no verdict.
        causes: why verdicts were missing, and how often; ``retries``: tries that were repeated.
        start_s, solve_s, verify_s: mean seconds of the oracle's attempts; of nop's where there are none.
        size_bytes: of the task folder.
        log_tail: the end of what the tests, or the solution, printed in the attempt that tells most.
    """

    status: Status
    digest: str = ""
    detail: str = ""
    oracle: tuple[float | None, ...] = ()
    nop: tuple[float | None, ...] = ()
    solution_exit_codes: tuple[int | None, ...] = ()
    causes: dict[str, int] = {}
    retries: int = 0
    start_s: float = 0.0
    solve_s: float = 0.0
    verify_s: float = 0.0
    size_bytes: int = 0
    log_tail: str = ""


class Report(_Record):
    """The whole study. ``complete`` is false if it ended before every task was tried; ``stopped`` says why."""

    version: Literal[1] = REPORT_VERSION
    tasks: str
    sandbox: str
    repeat: int
    complete: bool
    stopped: str = ""
    wall_s: float
    termrl: str
    results: dict[str, TaskReport]

    @property
    def sound(self) -> bool:
        """Whether every task was tried and is sound."""
        return self.complete and all(found.status is Status.SOUND for found in self.results.values())

    @property
    def counts(self) -> dict[Status, int]:
        """How many tasks have each status, in the order of :class:`Status`."""
        counted = Counter(found.status for found in self.results.values())
        return {status: counted[status] for status in Status if counted[status]}

    def json(self) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The report as a file holds it."""
        whole = self.model_dump(mode="json", exclude={"results"})
        whole["sound"] = self.sound
        whole["counts"] = {str(status): count for status, count in self.counts.items()}
        whole["results"] = {name: found.model_dump(mode="json") for name, found in sorted(self.results.items())}
        return orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    def write(self, path: Path) -> None:
        """Replace the report at ``path``.

        Raises:
            TermrlError: it cannot be written.
        """
        try:
            write_atomically(path, self.json())
        except OSError as error:
            raise TermrlError(f"{path}: cannot be written: {error.strerror or error}") from None


def read_report(path: Path) -> Report:
    """A report that :meth:`Report.write` wrote.

    Raises:
        TaskError: it is missing or is none.
    """
    hint = "termrl validate TASKS -o REPORT writes one"
    try:
        return Report.model_validate(orjson.loads(path.read_bytes()))
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror or error}", hint=hint) from None
    except (orjson.JSONDecodeError, ValidationError) as error:
        raise TaskError(f"{path}: not a report of termrl validate: {str(error).splitlines()[0]}", hint=hint) from None
