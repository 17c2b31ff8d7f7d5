"""Studies over real sandboxes: each kind of task gets its status, and the machine's faults are no task's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from termrl.errors import ImageError, SandboxError, SandboxLostError, SandboxStartError
from termrl.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from termrl.tasks import TaskSet
from termrl.tasks.generate import FAMILIES, generate
from termrl.validation.records import Report, Status
from termrl.validation.study import Follower, Plan, Study
from tests.validation.tasks import CHECK, add, add_all_kinds

QUICK = Plan(repeat=2, concurrency=4, backoff_s=(0.0,))


class WithFaults(SandboxProvider):
    """A real provider whose n-th sandbox fails, or is made from something else."""

    name = "with-faults"

    def __init__(self, inner: SandboxProvider) -> None:
        self.inner = inner
        self.made = self.peak = 0
        self.fault: Callable[[int], SandboxError | None] = lambda n: None
        self.change: Callable[[int, SandboxSpec], SandboxSpec] = lambda n, spec: spec

    def refusal(self, spec: SandboxSpec) -> str | None:
        return self.inner.refusal(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        number, self.made = self.made, self.made + 1
        if fault := self.fault(number):
            raise fault
        sandbox = await self.inner.create(self.change(number, spec))
        self.peak = max(self.peak, self.live)
        return sandbox

    async def close(self) -> None:
        await self.inner.close()

    @property
    def live(self) -> int:
        return self.inner.live


async def study(folder: Path, provider: SandboxProvider, plan: Plan = QUICK) -> Report:
    found = Study(TaskSet.load(folder, skip_broken=True), provider, plan)
    report = await found.run()
    assert provider.live == 0
    return report


async def test_every_kind_of_task_gets_its_status(provider: SandboxProvider, tmp_path: Path) -> None:
    wanted = add_all_kinds(tmp_path)
    report = await study(tmp_path, provider)
    assert {name: str(found.status) for name, found in report.results.items()} == wanted
    assert report.complete and not report.sound
    by_name = report.results
    assert (by_name["good"].oracle, by_name["good"].nop) == ((1, 1), (0, 0))
    good = by_name["good"]
    assert good.start_s > 0 and good.solve_s > 0 and good.verify_s > 0 and good.size_bytes > 100
    wrong = by_name["wrong-solution"]
    assert wrong.detail == "the tests give 0 after the solution, which ended with exit status 3"
    assert "solve.sh (exit status 3):\ntried" in wrong.log_tail and "test.sh:\nnot done" in wrong.log_tail
    assert by_name["unreadable"].detail.startswith("check.py: SyntaxError at line 1")
    assert "CRLF" in by_name["half-windows"].detail
    assert "no verdict within 0.5 s" in by_name["hangs"].detail
    assert by_name["downloads"].causes == {"bootstrap_failed": 4} and by_name["downloads"].retries == 8
    assert "network_mode public" in by_name["wants-network"].detail
    assert "TERMRL_NOT_SET is not set" in by_name["needs-variable"].detail
    assert "no task.toml" in by_name["no-toml"].detail


async def test_the_bundled_suite_is_sound_on_every_level(provider: SandboxProvider, tmp_path: Path) -> None:
    generate(tmp_path / "suite", families=list(FAMILIES), per_family=1)
    report = await study(tmp_path / "suite", provider, replace(QUICK, repeat=1))
    unsound = {name: found.detail for name, found in report.results.items() if found.status is not Status.SOUND}
    assert unsound == {} and report.sound
    assert len(report.results) == len(FAMILIES)


@pytest.mark.parametrize("kind", ["oracle", "nop"])
async def test_verdicts_that_differ_from_time_to_time_are_flaky(
    provider: SandboxProvider, tmp_path: Path, kind: str
) -> None:
    flips = "[ -z $FLIP ] || touch done" if kind == "nop" else "[ -z $FLIP ] || rm -f done"
    add(tmp_path, "moody", test=f"{flips}\n{CHECK}")
    faulty = WithFaults(provider)
    # attempts go oracle, nop, oracle, nop
    faulty.change = lambda n, spec: replace(spec, env={**spec.env, "FLIP": "1"}) if n >= 2 else spec
    found = (await study(tmp_path, faulty, replace(QUICK, concurrency=1))).results["moody"]
    assert found.status is Status.FLAKY
    assert "1 of 2 times" in found.detail
    assert sorted(found.oracle if kind == "oracle" else found.nop, key=str) == [0, 1]


@pytest.mark.parametrize("error", [SandboxStartError("no memory"), SandboxLostError("gone")])
async def test_what_the_machine_failed_is_made_again_and_counted_apart(
    provider: SandboxProvider, tmp_path: Path, error: SandboxError
) -> None:
    add(tmp_path, "good")
    faulty = WithFaults(provider)
    faulty.fault = lambda n: error if n in (0, 1, 3) else None
    report = await study(tmp_path, faulty, replace(QUICK, concurrency=1))
    found = report.results["good"]
    assert (found.status, found.retries, found.causes) == (Status.SOUND, 3, {})
    assert faulty.made == 4 + 3


async def test_a_machine_that_fails_again_and_again_says_nothing_of_the_task(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    add(tmp_path, "good")
    faulty = WithFaults(provider)
    faulty.fault = lambda n: SandboxStartError("no memory")
    found = (await study(tmp_path, faulty)).results["good"]
    assert (found.status, found.causes) == (Status.INFRASTRUCTURE, {"sandbox_start": 4})
    assert found.detail == "sandbox_start: no memory"
    assert faulty.made == 4 * (1 + QUICK.retries)


async def test_a_streak_of_failures_ends_the_study_and_says_why(provider: SandboxProvider, tmp_path: Path) -> None:
    for number in range(20):
        add(tmp_path, f"task-{number:02d}")
    faulty = WithFaults(provider)
    faulty.fault = lambda n: ImageError("rate limit of the registry") if n >= 8 else None
    report = await study(tmp_path, faulty, replace(QUICK, stop_after=5, concurrency=2))
    assert not report.complete and not report.sound
    assert "5 attempts in a row" in report.stopped and "rate limit of the registry" in report.stopped
    assert report.counts[Status.SOUND] == 2
    # one that began well may end in the midst of a row, which then begins anew
    assert faulty.made <= 8 + 4 + 5 + 2


async def test_an_image_that_cannot_be_had_is_asked_for_once(provider: SandboxProvider, tmp_path: Path) -> None:
    add(tmp_path, "good")
    faulty = WithFaults(provider)
    faulty.fault = lambda n: ImageError("no such image")
    found = (await study(tmp_path, faulty, replace(QUICK, concurrency=1))).results["good"]
    assert found.status is Status.IMAGE_UNAVAILABLE and faulty.made == 1


async def test_no_more_sandboxes_are_up_at_once_than_asked_for(provider: SandboxProvider, tmp_path: Path) -> None:
    for number in range(4):
        add(tmp_path, f"task-{number}")
    faulty = WithFaults(provider)
    await study(tmp_path, faulty, replace(QUICK, concurrency=3))
    assert 1 < faulty.peak <= 3 and faulty.made == 16


async def test_a_task_that_changes_in_mid_study_is_refused_by_name(provider: SandboxProvider, tmp_path: Path) -> None:
    add(tmp_path, "good")
    add(tmp_path, "other")
    tasks = TaskSet.load(tmp_path)
    # the kernel's clock for files ticks every few milliseconds
    await asyncio.sleep(0.02)

    def change(_: object) -> None:
        (tmp_path / "good" / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")

    report = await Study(tasks, provider, replace(QUICK, concurrency=1), follower=Follower(attempt=change)).run()
    assert report.results["good"].status is Status.REFUSED
    assert "good: changed on disk since it was loaded: tests/test.sh" in report.results["good"].detail
    assert report.results["other"].status is Status.SOUND


async def test_secrets_stand_nowhere_in_a_report_or_an_attempt(
    provider: SandboxProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMRL_TEST_KEY", "hunter2-hunter2")
    add(
        tmp_path,
        "talks",
        test='echo "$KEY"; echo 0 > /logs/verifier/reward.txt',
        solve='echo "$KEY" >&2; exit 1',
        toml='[metadata]\ntermrl_userland = "host"\n[environment]\nnetwork_mode = "no-network"\n'
        + '[verifier.env]\nKEY = "${TERMRL_TEST_KEY}"\n[solution.env]\nKEY = "${TERMRL_TEST_KEY}"\n',
    )
    written: list[str] = []
    follower = Follower(attempt=lambda attempt: written.append(attempt.model_dump_json()))
    report = await Study(TaskSet.load(tmp_path), provider, QUICK, follower=follower).run()
    log = report.results["talks"].log_tail
    assert log.count("[redacted TERMRL_TEST_KEY]") == 2
    assert "hunter2" not in report.json().decode() + "".join(written)
