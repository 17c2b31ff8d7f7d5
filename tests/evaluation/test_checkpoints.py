"""Checkpoints of a run, and models in this process, as the policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from termrl.config import TrainConfig
from termrl.errors import ModelError, RunError
from termrl.evaluation.config import EvalConfig
from termrl.evaluation.policies import find_model, presets
from termrl.evaluation.run import evaluate, prepare
from termrl.evaluation.store import EvalStore
from termrl.runs.files import read_jsonl
from termrl.runs.store import RunStore
from termrl.settings import load_settings, to_toml
from termrl.training import checkpoints
from termrl.training.events import Silent
from tests.endtoend.tiny import write_model, write_tasks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps whose learning rate makes its checkpoints differ."""
    from termrl.training.local import prepare as prepare_run
    from termrl.training.local import train

    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "model")
    write_tasks(folder / "train", ("apple", "berry"))
    write_tasks(folder / "held-out", ("cedar", "delta"), prefix="eval")
    settings: dict[str, object] = {
        "model.path": folder / "model",
        "model.threads": 1,
        "tasks.dir": folder / "train",
        "evaluation.dir": folder / "held-out",
        "rollout.groups": 2,
        "rollout.samples": 6,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.lr": 0.02,
        "training.warmup_steps": 0,
        "checkpoint.keep": 3,
        "sampling.temperature": 0.9,
        "steps": 3,
    }
    config = load_settings(TrainConfig, flags=[f"--{key}={value}" for key, value in settings.items()]).config
    model, pools = prepare_run(config)
    with RunStore.create(folder / "run", given="", resolved=to_toml(config)) as store:
        asyncio.run(train(config, store, Silent(), model=model, pools=pools))
    return folder


def measure(world: Path, run: Path, model: str, **overrides: object) -> dict[str, Any]:
    settings = {"policy.model": model, "policy.threads": 1, "tasks.dir": world / "held-out", "samples": 4, **overrides}
    flags = [f"--{key.replace('__', '.')}={value}" for key, value in settings.items()]
    first = load_settings(EvalConfig, flags=flags).config
    config = load_settings(EvalConfig, presets=presets(first.policy), flags=flags).config
    with EvalStore.begin(run, given="", resolved=to_toml(config)) as store:
        return asyncio.run(evaluate(config, store, Silent(), prepared=prepare(config, lambda line: None)))


def replies(run: Path) -> dict[tuple[str, int], list[str]]:
    lines = read_jsonl(run / "results.jsonl")
    return {(line["task_id"], line["sample"]): [turn["reply"] for turn in line["turns"]] for line in lines}


def test_a_checkpoint_answers_as_its_exported_model_and_not_as_its_base(world: Path, tmp_path: Path) -> None:
    from termrl.training.adapter import export_merged

    newest = checkpoints.latest(world / "run")
    assert newest is not None
    export_merged(world / "model", newest / "adapter", tmp_path / "exported")
    same = {"episode.max_turns": 2, "episode.max_tokens": 4, "sampling.temperature": 0.9, "concurrency": 1}
    summary = measure(world, tmp_path / "a", str(world / "run"), concurrency=1)
    measure(world, tmp_path / "b", str(tmp_path / "exported"), **same)
    measure(world, tmp_path / "c", str(world / "model"), **same)
    assert replies(tmp_path / "a") == replies(tmp_path / "b")
    assert replies(tmp_path / "a") != replies(tmp_path / "c")
    assert summary["graded"] == 8
    assert summary["completion_tokens"] > 0
    assert summary["policy"]["checkpoint"].endswith("step-000003")


def test_it_is_measured_with_the_settings_of_its_run(world: Path) -> None:
    (preset,) = presets(EvalConfig.model_validate({"policy": {"model": str(world / "run")}}).policy).values()
    assert (preset["episode"]["max_turns"], preset["episode"]["max_tokens"]) == (2, 4)
    assert preset["sampling"] == {"temperature": 0.9}
    flags = [f"--policy.model={world / 'run'}@1", "--episode.max_tokens=7"]
    config = load_settings(EvalConfig, presets={"run": preset}, flags=flags).config
    assert (config.episode.max_turns, config.episode.max_tokens) == (2, 7)


def test_any_checkpoint_can_be_named(world: Path) -> None:
    run = world / "run"
    newest, first = find_model(str(run)), find_model(f"{run}@1")
    assert newest.checkpoint == run / "checkpoints" / "step-000003"
    assert first.checkpoint == run / "checkpoints" / "step-000001"
    assert first.adapter == run / "checkpoints" / "step-000001" / "adapter"
    assert find_model(f"{run}@best").checkpoint == checkpoints.best(run)
    assert first.folder == world / "model"
    base = find_model(str(world / "model"))
    assert len({newest.digest, first.digest, base.digest}) == 3


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(world: Path) -> None:
    with pytest.raises(RunError, match="has no checkpoint 9") as error:
        find_model(f"{world / 'run'}@9")
    assert "1, 2, 3" in (error.value.hint or "")
    with pytest.raises(RunError, match="has no checkpoint last"):
        find_model(f"{world / 'run'}@last")
    with pytest.raises(ModelError, match="no such model"):
        find_model("/no/such/run@1")


def test_a_full_fine_tunes_checkpoint_is_the_model_itself(world: Path, tmp_path: Path) -> None:
    run = tmp_path / "full"
    checkpoint = run / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (run / "config.toml").write_text((world / "run" / "config.toml").read_text())
    (checkpoint / "model").symlink_to(world / "model")
    assert find_model(str(run)).folder == checkpoint / "model"
    assert find_model(str(run)).adapter is None


def test_a_resume_after_the_run_went_on_is_refused(world: Path, tmp_path: Path) -> None:
    """RUN means its newest checkpoint: another one is another policy."""
    import shutil

    run = tmp_path / "run"
    shutil.copytree(world / "run", run)
    shutil.move(run / "checkpoints" / "step-000003", tmp_path / "held-back")
    measure(world, tmp_path / "results", str(run), samples=1)
    shutil.move(tmp_path / "held-back", run / "checkpoints" / "step-000003")
    with EvalStore.go_on(tmp_path / "results") as store:
        config = load_settings(EvalConfig, files=[tmp_path / "results" / "config.toml"]).config
        prepared = prepare(config, lambda line: None)
        with pytest.raises(RunError, match="the model changed since the run began"):
            asyncio.run(evaluate(config, store, Silent(), prepared=prepared))
