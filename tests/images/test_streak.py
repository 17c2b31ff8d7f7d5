"""A registry that gives nothing out: no episode is scored 0, and the run stops and says why."""

from __future__ import annotations

from pathlib import Path

from termrl.agent.episode import run_episode
from termrl.agent.prompts import opening
from termrl.agent.types import Limits
from termrl.config import StopConfig
from termrl.environment.terminal import LocalEnvironmentFactory
from termrl.rollout.groups import Group, build_batch
from termrl.runs.metrics import rollout_metrics
from termrl.runs.progress import Progress
from termrl.sandboxes.docker.provider import DockerProvider
from termrl.tasks import TaskSet
from termrl.verifier.verdict import Cause, EndReason
from tests.agent.fakes import ScriptedPolicy
from tests.images.registry import TinyRegistry
from tests.tasks.helpers import write_task


async def test_a_streak_of_rate_limits_stops_the_run_with_the_name(
    registry: TinyRegistry, state: Path, tmp_path: Path
) -> None:
    registry.limited = 10_000
    toml = f'[environment]\nnetwork_mode = "no-network"\ndocker_image = "127.0.0.1:{registry.port}/team/{{}}:1"\n'
    for name in ("one", "two"):
        write_task(tmp_path / name, toml=toml.format(name))
    progress = Progress()
    async with DockerProvider(state=state, images={"pull_attempts": 2, "pull_backoff_s": 0.01}) as provider:
        factory = LocalEnvironmentFactory(TaskSet.load(tmp_path), provider)
        for step in (1, 2):
            groups = []
            for index, name in enumerate(("one", "two")):
                episodes = []
                for seed in range(4):
                    environment = factory.create()
                    episodes.append(
                        await run_episode(
                            environment,
                            ScriptedPolicy("done"),
                            task_id=name,
                            opening=opening("first-steps"),
                            limits=Limits(),
                            seed=seed,
                        )
                    )
                    await environment.close()
                groups.append(Group(index, name, name, tuple(episodes)))
            played = [episode for group in groups for episode in group.episodes]
            assert {episode.reward for episode in played} == {None}
            assert {episode.end_reason for episode in played} == {EndReason.ENVIRONMENT_ERROR}
            assert {episode.verdict.cause for episode in played if episode.verdict} == {Cause.IMAGE_UNAVAILABLE}
            batch = build_batch(groups)
            assert not batch.samples
            progress.finish_step(step, {**rollout_metrics(groups, batch), "perf/step_s": 1.0}, batch)
    # The registry was asked by the first pull only.
    assert sum(registry.asked.values()) <= 4
    why = progress.hopeless(StopConfig())
    assert why is not None
    assert "no episode of the last 2 steps got a verdict (16 image_unavailable): " in why
    assert "rate limit" in why
