"""What the infrastructure does wrong is dropped or tried again, never a 0; surplus episodes end at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import termrl.sandboxes
from termrl.errors import RunError
from termrl.integrations.miles import abort, keep_group, log_eval, log_rollout, run
from termrl.integrations.miles.outcome import nothing
from termrl.integrations.miles.report import TALLY
from termrl.verifier.verdict import Cause, EndReason
from tests.endtoend.faults import FaultyProvider, faulty
from tests.endtoend.served import served
from tests.environment.client.conftest import error, misbehaving, settled
from tests.integrations.miles.conftest import Open
from tests.integrations.miles.fakemiles import Sample, check_no_aborted, prompt_groups
from tests.integrations.miles.scripts import DONE, LOOK, MAKE_APPLE

Make = Callable[..., Sample]
SLEEP = "```bash\nsleep 60\n```"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, sandboxes: None) -> list[FaultyProvider]:
    """Every sandbox has a fault; what was injected."""
    made: list[FaultyProvider] = []
    monkeypatch.setattr(termrl.sandboxes, "open_provider", faulty(1.0, 3, made))
    return made


class TestFaultsOfTheSandbox:
    async def test_none_gives_a_reward_and_each_is_counted_under_its_cause(
        self, made: list[FaultyProvider], miles: Open, sample: Make
    ) -> None:
        async with miles(LOOK, MAKE_APPLE, DONE) as worker:
            group = await worker.group([sample() for _ in range(12)])
        assert {played.reward for played in group} == {None}
        assert {played.status for played in group} == {Sample.Status.ABORTED}
        metrics: dict[str, Any] = {}
        log_rollout(0, None, [], metrics, 1.0)
        (provider,) = made
        counted = sum(count for name, count in metrics.items() if name.startswith(("agent/dropped", "agent/retried")))
        assert counted == provider.injected.total() > 12
        assert metrics["agent/episodes"] == 12
        assert metrics["agent/fault_rate"] == 1.0

    async def test_what_fails_before_the_first_turn_is_tried_again(
        self, monkeypatch: pytest.MonkeyPatch, sandboxes: None, miles: Open, sample: Make
    ) -> None:
        made: list[FaultyProvider] = []
        monkeypatch.setattr(termrl.sandboxes, "open_provider", faulty(0.0, 0, made))
        starts = iter([1.0, 1.0, 0.0])
        monkeypatch.setattr("tests.endtoend.faults.KINDS", [Cause.SANDBOX_START])
        create = FaultyProvider.create

        async def second_best(provider: FaultyProvider, spec: Any) -> Any:
            provider._rate = next(starts)
            return await create(provider, spec)

        monkeypatch.setattr(FaultyProvider, "create", second_best)
        async with miles(MAKE_APPLE, DONE) as worker:
            played = await worker.sample(sample())
        assert played.reward == 1.0
        assert played.metadata["agent_metrics"]["retried"] == ["sandbox_start", "sandbox_start"]
        assert len(played.segments) == 1

    async def test_the_policys_own_failures_are_zeros_among_faults(
        self, monkeypatch: pytest.MonkeyPatch, sandboxes: None, miles: Open, sample: Make
    ) -> None:
        made: list[FaultyProvider] = []
        monkeypatch.setattr(termrl.sandboxes, "open_provider", faulty(0.3, 5, made))
        async with miles("```bash\ntouch x\n```", DONE) as worker:
            group = await worker.group([sample() for _ in range(20)])
        rewards = [played.reward for played in group]
        assert set(rewards) == {None, 0.0}
        lost = sum(count for name, count in TALLY.take().items() if name.startswith(("agent/dropped", "agent/retried")))
        assert lost == made[0].injected.total()


class TestAServer:
    @pytest.fixture
    def settings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
        def use(url: str, **environment: Any) -> None:
            file = tmp_path / "agent.toml"
            lines = [f"{name} = {json.dumps(value)}" for name, value in environment.items()]
            file.write_text("\n".join(["retry_wait_s = 0.01", "[environment]", *lines]))
            monkeypatch.setenv("OPENENV_CONFIG", str(file))
            monkeypatch.setenv("OPENENV_ENV_URL", url)

        return use

    async def test_a_shared_server_plays_and_scores(
        self, settings: Callable[..., None], tasks: Path, miles: Open, sample: Make
    ) -> None:
        with served(tasks) as server:
            settings(server.url)
            async with miles(MAKE_APPLE, DONE) as worker:
                group = await worker.group([sample(), sample("make-berry"), sample("no-such-task")])
        assert [played.reward for played in group] == [1.0, 0.0, None]

    async def test_a_server_that_dies_in_mid_episode_loses_the_sample_and_never_replays_its_session(
        self, settings: Callable[..., None], tasks: Path, miles: Open, sample: Make
    ) -> None:
        with served(tasks) as server:
            settings(server.url)
            async with miles(LOOK, SLEEP, DONE) as worker:
                playing = asyncio.ensure_future(worker.sample(sample()))
                await asyncio.sleep(2.0)
                os.kill(server.process.pid, signal.SIGKILL)
                played = await playing
        assert played.reward is None and played.status is Sample.Status.ABORTED
        metrics = played.metadata["agent_metrics"]
        assert (metrics["cause"], metrics["turns"], metrics["attempts"]) == ("environment_lost", 2, 1)
        assert played.segments[0].turns == 2

    async def test_no_free_slot_is_waited_for_then_dropped(
        self, settings: Callable[..., None], miles: Open, sample: Make
    ) -> None:
        async def full(connection: Any) -> None:
            async for _ in connection:
                await connection.send(error("CAPACITY_REACHED", "full", active_sessions=1, max_sessions=1))
                return

        async with misbehaving(full) as url, miles(DONE) as worker:
            settings(url, capacity_wait_s=0.3)
            played = await worker.sample(sample())
        assert played.reward is None and played.status is Sample.Status.ABORTED
        assert TALLY.take()["agent/dropped/capacity"] == 1

    async def test_no_server_at_all_is_tried_again_then_dropped(
        self, settings: Callable[..., None], miles: Open, sample: Make
    ) -> None:
        settings("http://127.0.0.1:9")
        async with miles(DONE) as worker:
            played = await worker.sample(sample())
        assert played.reward is None and played.status is Sample.Status.ABORTED
        assert not worker.raised


@pytest.mark.usefixtures("sandboxes")
class TestAbort:
    async def test_it_ends_every_running_episode_and_its_sandbox(
        self, monkeypatch: pytest.MonkeyPatch, miles: Open, sample: Make
    ) -> None:
        made: list[FaultyProvider] = []
        monkeypatch.setattr(termrl.sandboxes, "open_provider", faulty(0.0, 0, made))
        async with miles(SLEEP) as worker:
            async with asyncio.timeout(20), asyncio.TaskGroup() as playing:
                played = playing.create_task(worker.group([sample() for _ in range(6)]))
                assert await settled(lambda: bool(made) and made[0].live == 6)
                await abort(worker.args)
                assert made[0].live == 0
            group = played.result()
        assert {played.reward for played in group} == {None}
        assert {played.status for played in group} == {Sample.Status.ABORTED}
        counts = TALLY.take()
        assert counts["agent/dropped/cancelled"] == 6 and "agent/fault_rate" not in counts

    async def test_episodes_of_another_event_loop_end_too(self, miles: Open, sample: Make) -> None:
        async def play() -> Sample:
            async with miles(SLEEP) as worker:
                return await worker.sample(sample())

        from termrl.integrations.miles import agent

        playing = asyncio.ensure_future(asyncio.to_thread(asyncio.run, play()))
        assert await settled(lambda: bool(agent._running))
        await asyncio.sleep(0.5)
        await abort()
        assert (await playing).reward is None

    async def test_a_cancelled_call_closes_its_sandbox_and_is_cancelled(
        self, monkeypatch: pytest.MonkeyPatch, miles: Open, sample: Make
    ) -> None:
        made: list[FaultyProvider] = []
        monkeypatch.setattr(termrl.sandboxes, "open_provider", faulty(0.0, 0, made))
        async with miles(SLEEP) as worker:
            playing = asyncio.ensure_future(worker.group([sample(), sample()]))
            assert await settled(lambda: bool(made) and made[0].live == 2)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert made[0].live == 0

    async def test_nothing_running_is_fine(self) -> None:
        await abort(None)

    async def test_a_rollout_aborts_its_surplus_and_the_next_one_plays_again(self, miles: Open, tmp_path: Path) -> None:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": [], "metadata": {"task_id": "make-apple"}}) + "\n")
        async with miles(MAKE_APPLE, LOOK, DONE) as worker:
            prompts = prompt_groups(rows, samples=2)
            for _ in range(2):
                found = await worker.rollout(prompts, groups=2, at_once=4)
                assert len(found.kept) == 2
                assert all(played.reward == 1.0 for group in found.kept for played in group)


class TestGroups:
    def _group(self, *rewards: float | None) -> list[Sample]:
        made = [Sample(0, 0, [], {"reward": reward}, reward) for reward in rewards]
        for one in made:
            one.status = Sample.Status.ABORTED if one.reward is None else Sample.Status.COMPLETED
            one.metadata["agent_metrics"] = {"cause": "capacity" if one.reward is None else None, "turns": 3}
        return made

    @pytest.mark.parametrize("rewards", [(1.0, 0.0), (None, 1.0), (None, None), (0.0, 0.0)])
    def test_the_filter_drops_what_miles_own_filter_drops(self, rewards: tuple[float | None, ...]) -> None:
        group = self._group(*rewards)
        assert keep_group(None, group) == check_no_aborted(None, group)[0]
        assert keep_group(None, [group]) == check_no_aborted(None, [group])[0]

    def test_a_run_in_which_every_group_is_lost_ends_and_says_why(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "agent.toml").write_text("stop_after_lost_groups = 3\n")
        monkeypatch.setenv("OPENENV_CONFIG", str(tmp_path / "agent.toml"))
        lost, kept = self._group(None, 1.0), self._group(1.0, 0.0)
        TALLY.ended(nothing(EndReason.ENVIRONMENT_ERROR, Cause.CAPACITY, "no slot"))
        TALLY.ended(nothing(EndReason.ABORTED, Cause.CANCELLED, "surplus"))
        for group in (lost, lost, kept, lost, lost):
            keep_group(None, group)
        with pytest.raises(RunError, match=r"3 groups in a row were lost.*\n1 × capacity: no slot$"):
            keep_group(None, lost)

    def test_groups_lost_and_means_are_logged_with_what_miles_logs(self) -> None:
        metrics = {"rollout/dynamic_filter/drop_group_has_aborted": 4, "other": 1}
        assert log_rollout(0, None, [self._group(1.0, 0.0)], metrics, 1.0) is False
        assert metrics["agent/groups_lost"] == 4 and metrics["other"] == 1
        assert metrics["agent/turns"] == 3.0

    def test_an_evaluations_metrics_have_their_own_prefix(self) -> None:
        metrics: dict[str, Any] = {"x": 1}
        data = {"held-out": {"rewards": [1.0], "samples": self._group(1.0)}}
        assert log_eval(0, None, data, metrics) is False
        assert metrics["eval/agent/turns"] == 3.0

    def test_without_metrics_of_miles_nothing_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert log_rollout(0, None, [], None, 1.0) is False


@pytest.mark.usefixtures("sandboxes")
async def test_hosted_sandboxes_are_refused_by_the_name_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENENV_SANDBOX_BACKEND", "daytona")
    result = await run(base_url="http://127.0.0.1:9/sessions/x", prompt=[], metadata={"task_id": "make-apple"})
    assert result["reward"] is None
    assert "OPENENV_SANDBOX_BACKEND" in result["eval_report"]["detail"] and "OPENENV_SANDBOX_BACKEND" in caplog.text
