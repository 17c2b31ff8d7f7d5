"""The suite tells a backend that conforms from one that does not."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from termrl.errors import CommandError
from termrl.sandboxes.base import ExecResult, Sandbox, SandboxSpec
from termrl.sandboxes.bubblewrap import BubblewrapProvider
from termrl.sandboxes.conformance import CHECKS, Check, Subject, run_checks
from termrl.sandboxes.conformance.check import NotHere, Section, need

BY_NAME = {check.name: check for check in CHECKS}


class FakeFaulty(BubblewrapProvider):
    """The real backend with one fault put into every sandbox that it makes."""

    fault: Callable[[Sandbox], None]

    async def create(self, spec: SandboxSpec) -> Any:
        sandbox = await super().create(spec)
        self.fault(sandbox)
        return sandbox


@pytest.fixture
async def faulty(state: Path) -> AsyncIterator[FakeFaulty]:
    async with FakeFaulty(state=state) as provider:
        yield provider


def result_with(**changes: Any) -> Callable[[Sandbox], None]:
    """Every result has these fields."""

    def spoil(sandbox: Any) -> None:
        real = sandbox.exec

        async def spoilt(command: str, **options: Any) -> ExecResult:
            return dataclasses.replace(await real(command, **options), **changes)

        sandbox.exec = spoilt

    return spoil


def command_becomes(change: Callable[[str], str]) -> Callable[[Sandbox], None]:
    """Every command is another."""

    def spoil(sandbox: Any) -> None:
        real = sandbox.exec

        async def spoilt(command: str, **options: Any) -> ExecResult:
            return await real(change(command), **options)

        sandbox.exec = spoilt

    return spoil


def errors_become_output(sandbox: Any) -> None:
    real = sandbox.exec

    async def spoilt(command: str, **options: Any) -> ExecResult:
        try:
            return await real(command, **options)
        except CommandError as error:
            return ExecResult(str(error), 126)

    sandbox.exec = spoilt


def one_at_a_time(sandbox: Any) -> None:
    real, lock = sandbox.exec, asyncio.Lock()

    async def spoilt(command: str, **options: Any) -> ExecResult:
        async with lock:
            return await real(command, **options)

    sandbox.exec = spoilt


def no_timeout(sandbox: Any) -> None:
    real = sandbox.exec

    async def spoilt(command: str, **options: Any) -> ExecResult:
        return await real(command, **{**options, "timeout_s": options["timeout_s"] + 3.5})

    sandbox.exec = spoilt


def window_keeps_logs(sandbox: Any) -> None:
    async def spoilt(tests: Path, **options: Any) -> None:
        for source in tests.iterdir():
            (sandbox.tests / source.name).write_bytes(source.read_bytes())

    sandbox.open_verify_window = spoilt


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("exit-code", result_with(exit_code=0)),
        ("exit-code", result_with(duration_s=0.0)),
        ("timeout-kills-the-tree", result_with(exit_code=-1)),
        ("timeout-kills-the-tree", result_with(output="")),
        ("timeout-kills-the-tree", no_timeout),
        ("background-holds-stdout", result_with(background=0)),
        ("background-holds-stdout", command_becomes(lambda text: f"({text}); wait $(jobs -p); sleep 4")),
        ("flood", result_with(truncated_bytes=0)),
        ("out-of-memory", result_with(oom=True)),
        ("bad-cwd", errors_become_output),
        ("shell-cannot-start", errors_become_output),
        ("nul-byte", errors_become_output),
        ("fresh-shell", command_becomes(lambda text: f"x=1; {text}")),
        ("kind-of-shell", command_becomes(lambda text: f"set -m; {text}")),
        ("descriptors", command_becomes(lambda text: f"exec 7</dev/null; {text}")),
        ("stdin", command_becomes(lambda text: f"exec < /etc/passwd; {text}")),
        ("sixteen-at-once", one_at_a_time),
        ("planted-logs", window_keeps_logs),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
async def test_a_faulty_backend_fails(faulty: FakeFaulty, name: str, fault: Callable[[Sandbox], None]) -> None:
    faulty.fault = fault
    assert await BY_NAME[name].run(Subject(faulty)) is not None


async def test_a_sandbox_that_lets_processes_live_fails_the_leak_checks(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"state": str(state)}
    async with BubblewrapProvider(state=state) as provider:
        subject = Subject(provider, backend="bubblewrap", settings=settings)
        monkeypatch.setattr(provider, "remains", lambda: ["folder /left"])
        failure = await BY_NAME["killed-then-swept"].run(subject)
        assert failure is not None and "folder /left" in failure.message


async def test_without_a_name_to_open_it_by_the_killed_owner_is_skipped_with_the_reason(state: Path) -> None:
    async with BubblewrapProvider(state=state) as provider:
        checks = [BY_NAME["killed-then-swept"]]
        (outcome,) = [outcome async for outcome in run_checks(Subject(provider), checks)]
    assert outcome.state == "skipped" and "another process" in outcome.detail


async def test_a_check_that_hangs_or_raises_is_a_failure_and_the_next_one_runs(state: Path) -> None:
    section = Section("sample")

    @section.check("never ends", within_s=0.05)
    async def hangs(subject: Subject) -> None:
        await asyncio.sleep(60)

    @section.check("raises")
    async def raises(subject: Subject) -> None:
        raise KeyError("odd")

    @section.check("holds")
    async def fine(subject: Subject) -> None:
        need(True, "")

    @section.check("cannot say")
    async def unclear(subject: Subject) -> None:
        raise NotHere("no such thing")

    async with BubblewrapProvider(state=state) as provider:
        outcomes = [outcome async for outcome in run_checks(Subject(provider), section.checks)]
    found = [(outcome.check.name, outcome.state, outcome.detail) for outcome in outcomes]
    assert found == [
        ("hangs", "fails", "did not end within 0.05 s"),
        ("raises", "fails", "raised KeyError: 'odd'"),
        ("fine", "holds", ""),
        ("unclear", "skipped", "no such thing"),
    ]


async def test_checks_that_may_run_beside_each_other_and_the_others_run_alone(state: Path) -> None:
    section = Section("sample")
    running: list[str] = []
    met = asyncio.Barrier(2)

    async def overlap(name: str) -> list[str]:
        running.append(name)
        await asyncio.sleep(0.05)
        seen = list(running)
        running.remove(name)
        return seen

    @section.check("first of two", within_s=5)
    async def one(subject: Subject) -> None:
        await met.wait()

    @section.check("by itself", alone=True)
    async def by_itself(subject: Subject) -> None:
        need(await overlap("by itself") == ["by itself"], "something runs beside it")

    @section.check("second of two", within_s=5)
    async def two(subject: Subject) -> None:
        await met.wait()

    @section.check("by itself too", alone=True)
    async def by_itself_too(subject: Subject) -> None:
        need(await overlap("by itself too") == ["by itself too"], "something runs beside it")

    async with BubblewrapProvider(state=state) as provider:
        outcomes = [outcome async for outcome in run_checks(Subject(provider), section.checks, at_once=2)]
    assert [outcome.state for outcome in outcomes] == ["holds"] * 4, outcomes
    assert [outcome.check.name for outcome in outcomes][2:] == ["by-itself", "by-itself-too"]


def test_names_are_unique_and_every_check_says_what_must_hold() -> None:
    assert len(BY_NAME) == len(CHECKS) > 60
    assert all(isinstance(check, Check) and check.what and check.within_s <= 90 for check in CHECKS)
    assert {check.section for check in CHECKS} == {"exec", "output", "files", "limits", "isolation", "leaks"}
