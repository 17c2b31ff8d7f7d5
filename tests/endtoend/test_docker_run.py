"""Training on Docker: the example's run, made small, on the bundled tasks in containers of a local image."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from termrl.config import TrainConfig
from termrl.runs.store import RunStore
from termrl.sandboxes.docker.provider import DockerProvider
from termrl.settings import load_settings, to_toml
from termrl.training.events import Silent
from tests.docker import IMAGE
from tests.endtoend.outcome import outcome

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "model.threads": 1,
    "tasks.families": '["make-dir", "remove-file"]',
    "evaluation.untrained_families": "[]",
    "evaluation.per_family": 1,
    "rollout.groups": 2,
    "rollout.samples": 3,
    "episode.max_turns": 2,
    "episode.max_tokens": 4,
    "steps": 2,
}


@pytest.fixture
def config(world: Path, tmp_path: Path, docker_required: None) -> TrainConfig:
    local = tmp_path / "local.toml"
    local.write_text(f'[images]\n"debian:12-slim" = "{IMAGE}"\n')
    flags = [f"--{key}={value}" for key, value in {**SMALL, "model.path": world / "model"}.items()]
    return load_settings(TrainConfig, files=(EXAMPLES / "first-steps-docker.toml", local), flags=flags).config


@pytest.fixture
def nothing_left(state: Path, docker_required: None) -> Iterator[None]:
    yield

    async def look() -> list[str]:
        async with DockerProvider(state=state) as provider:
            ours = {"label": f"termrl.pid={os.getpid()}"}
            found = provider.daemon.client.api.containers(all=True, filters=ours)
            return [*provider.remains(), *(one["Id"] for one in found)]

    assert asyncio.run(look()) == []


def test_the_example_for_docker_trains_and_leaves_nothing_behind(
    config: TrainConfig, tmp_path: Path, nothing_left: None
) -> None:
    from termrl.training.local import prepare, train

    assert config.sandbox.backend == "docker"
    model, pools = prepare(config)
    with RunStore.create(tmp_path / "run", given="", resolved=to_toml(config)) as store:
        asyncio.run(train(config, store, Silent(), model=model, pools=pools))
    episodes = outcome(tmp_path / "run")["episodes"]
    assert len(episodes) >= 2 * 6
    assert {episode["step"] for episode in episodes} >= {1, 2}
    assert [episode for episode in episodes if episode["reward"] is None] == []
