"""Whole runs of the real thing, on a tiny model: real server, engine, sandboxes, tests, GRPO, files and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from termrl.config import TrainConfig
from termrl.errors import RunError
from termrl.runs.files import read_jsonl
from termrl.runs.store import RunStore
from termrl.settings import load_settings, to_toml
from tests.endtoend.tiny import write_model, write_tasks

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def world(world: Path) -> Path:
    write_model(world / "mute", acts=False)
    return world


def flags(world: Path, **overrides: object) -> list[str]:
    settings: dict[str, object] = {
        "model.path": world / "model",
        "model.threads": 1,
        "tasks.dir": world / "train",
        "evaluation.dir": world / "held-out",
        "rollout.groups": 3,
        "rollout.samples": 6,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.lr": 0.02,
        "training.warmup_steps": 0,
        "steps": 2,
    }
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    return [f"--{key}={value}" for key, value in settings.items()]


def run_here(world: Path, run: Path, **overrides: object) -> dict[str, Any]:
    from termrl.training.events import Silent
    from termrl.training.local import prepare, train

    config = load_settings(TrainConfig, flags=flags(world, **overrides)).config
    model, pools = prepare(config)
    with RunStore.create(run, given="", resolved=to_toml(config)) as store:
        return asyncio.run(train(config, store, Silent(), model=model, pools=pools))


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "termrl", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if any(r["step"] >= step and r["phase"] == "train" for r in read_jsonl(run / "metrics.jsonl")):
            return
        if process.poll() is not None:
            pytest.fail(f"ended early: {process.communicate()[1]}")
        time.sleep(0.02)
    process.kill()
    pytest.fail("no step within 90 s")


def figures(run: Path) -> list[dict[str, Any]]:
    """The metrics without what measures time."""
    return [{k: v for k, v in r.items() if not k.startswith("perf/")} for r in read_jsonl(run / "metrics.jsonl")]


def tokens(run: Path) -> list[list[dict[str, Any]]]:
    import pyarrow.parquet as pq

    tables = [pq.read_table(path).drop(["session_id"]) for path in sorted((run / "tokens").iterdir())]
    return [table.to_pylist() for table in tables]


@pytest.fixture(scope="module")
def finished(world: Path) -> Iterator[Path]:
    run_here(world, world / "first", steps=3)
    yield world / "first"


def test_the_same_run_twice_has_the_same_figures_and_tokens_to_the_last_digit(world: Path, finished: Path) -> None:
    run_here(world, world / "second", steps=3)
    assert figures(world / "second") == figures(finished)
    assert tokens(world / "second") == tokens(finished)


def test_another_seed_is_another_run(world: Path, finished: Path) -> None:
    run_here(world, world / "other-seed", seed=1, steps=1)
    assert tokens(world / "other-seed")[0] != tokens(finished)[0]


def test_the_summary_accounts_for_every_token_and_episode(finished: Path) -> None:
    summary = orjson.loads((finished / "summary.json").read_bytes())
    assert (summary["steps"], summary["episodes"], summary["dropped"]) == (3, 54, {})
    assert summary["tokens_trained"] == summary["tokens_captured"] - summary["tokens_masked"] > 0
    assert summary["logprob_diff"] <= 1e-4
    assert summary["re_rendered_turns"] == 0
    assert summary["eval_by_family"].keys() == {"mkdir"}
    assert summary["stopped"] is None
    episodes = list(read_jsonl(finished / "episodes.jsonl"))
    assert len([e for e in episodes if e["phase"] == "train"]) == 54
    assert {e["reward"] for e in episodes if e["phase"] == "train"} == {0.0, 1.0}
    captured = sum(sum(row["loss_mask"]) for step in tokens(finished) for row in step)
    assert captured == summary["tokens_captured"]


def test_every_episode_is_recorded_whole(finished: Path) -> None:
    for episode in read_jsonl(finished / "episodes.jsonl"):
        assert episode["end_reason"] in ("task_complete", "max_turns", "length", "no_command")
        assert episode["verdict"]["outcome"] in ("passed", "failed")
        assert (episode["cause"] is None) == (episode["reward"] == 1.0)
        assert episode["turns"][0]["seed"] is not None
        assert episode["tokens"] > 0
        assert episode["instruction"].startswith("Make a directory")


def test_it_learns(world: Path) -> None:
    write_tasks(world / "one", ("apple",))
    overrides = {"tasks.dir": world / "one", "rollout.groups": 1, "rollout.samples": 16, "training.lr": 0.01}
    summary = run_here(world, world / "learns", **overrides, steps=9)
    rewards = summary["rewards"]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_killed_run_resumes_to_the_same_figures(world: Path, finished: Path) -> None:
    run = world / "killed"
    process = start("train", *flags(world, steps=3), "--run-dir", str(run))
    wait_for_step(process, run, 1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (run / "summary.json").exists()
    resumed = start("train", "--resume", str(run))
    out, error = resumed.communicate(timeout=100)
    assert resumed.returncode == 0, error
    assert figures(run) == figures(finished)
    assert tokens(run) == tokens(finished)
    assert "run folder" in out


def test_ctrl_c_checkpoints_sweeps_and_exits_130(world: Path, state: Path) -> None:
    run = world / "interrupted"
    process = start("train", *flags(world, steps=500, training__lr=1e-6), "--run-dir", str(run))
    wait_for_step(process, run, 1)
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches every process of the group
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert f"train --resume {run}" in error
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert summary["stopped"] == "interrupted"
    last = max(r["step"] for r in read_jsonl(run / "metrics.jsonl"))
    assert summary["steps"] == last
    assert sorted((run / "checkpoints").iterdir())[-1].name == f"step-{last:06d}"
    assert not [p for p in run.rglob("*") if ".partial" in p.name or p.name.startswith(".")]
    assert list((state / "owners").iterdir()) == []


def test_a_second_run_in_the_same_folder_is_refused(world: Path, finished: Path) -> None:
    before = (finished / "summary.json").read_bytes()
    process = start("train", *flags(world), "--run-dir", str(finished))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "holds a run already" in error
    assert "Traceback" not in error
    assert (finished / "summary.json").read_bytes() == before


def test_a_model_that_never_acts_stops_the_run_and_says_why(world: Path) -> None:
    with pytest.raises(RunError, match="ran a command"):
        run_here(world, world / "mute-run", **{"model.path": world / "mute"}, steps=50)
    summary = orjson.loads((world / "mute-run" / "summary.json").read_bytes())
    assert summary["steps"] == 2
    assert "not one of" in summary["stopped"]


def test_the_merged_export_is_the_trained_model(world: Path, finished: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    process = start("export", str(finished), "--merged", "--out", str(tmp_path / "model"))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(world / "model")
    changed = [
        name
        for (name, new), old in zip(merged.named_parameters(), base.parameters(), strict=True)
        if not torch.equal(new, old)
    ]
    assert any("q_proj" in name for name in changed)
    assert not any("embed" in name or "lm_head" in name for name in changed)


def test_groups_of_the_same_task_in_one_step_draw_different_numbers(finished: Path) -> None:
    seeds = [(e["step"], e["seed"]) for e in read_jsonl(finished / "episodes.jsonl") if e["phase"] == "train"]
    assert len(set(seeds)) == len(seeds)


def test_waiting_for_others_does_not_count_as_service(finished: Path) -> None:
    for episode in read_jsonl(finished / "episodes.jsonl"):
        assert episode["timings"]["generation_s"] + episode["timings"]["queue_s"] <= episode["timings"]["total_s"]
        assert all(0 < turn["generation_s"] < 1 for turn in episode["turns"])
        if episode["phase"] == "train":
            assert episode["timings"]["queue_s"] > episode["timings"]["generation_s"]


def test_tasks_that_the_sandbox_cannot_run_are_refused_by_name_before_a_folder_is_made(world: Path) -> None:
    tasks = write_tasks(world / "imaged", ("apple", "berry"), host=False)
    process = start("train", *flags(world, **{"tasks.dir": tasks}), "--run-dir", str(world / "refused"))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2, error
    assert "make-apple: needs image debian:12-slim" in error
    assert "make-berry: needs image debian:12-slim" in error
    assert "Traceback" not in error
    assert not (world / "refused").exists()


def test_broken_tasks_are_named_and_can_be_skipped(world: Path) -> None:
    tasks = write_tasks(world / "half-broken", ("apple", "berry"))
    (tasks / "make-berry" / "task.toml").write_text("not toml")
    process = start("train", *flags(world, **{"tasks.dir": tasks}), "--run-dir", str(world / "skipped"))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "make-berry" in error
    assert "--skip-broken" in error
    assert "Traceback" not in error
    assert not (world / "skipped").exists()
    summary = run_here(world, world / "skipped", **{"tasks.dir": tasks, "tasks.skip_broken": True}, steps=0)
    assert summary["steps"] == 0
    assert summary["eval_before"] == summary["eval_after"]


def test_a_run_in_which_no_episode_gets_a_verdict_stops_at_once_and_says_why(world: Path) -> None:
    tasks = write_tasks(world / "crashing", ("cedar",), prefix="eval", test="exit 3\n")
    with pytest.raises(RunError, match="no episode of the evaluation got a verdict"):
        run_here(world, world / "no-verdicts", **{"evaluation.dir": tasks})
    summary = orjson.loads((world / "no-verdicts" / "summary.json").read_bytes())
    assert "got a verdict" in summary["stopped"]
    assert summary["steps"] == 0
