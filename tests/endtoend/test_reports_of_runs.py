"""What people who do this job ran into, shown by whole runs of the real thing on a tiny model."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from termrl.agent.types import Episode
from termrl.capture.segments import Segment
from termrl.capture.upstreams import GenerateRequest, GenerateResult, SamplingParams
from termrl.config import TrainConfig
from termrl.errors import RunError, SandboxStartError
from termrl.rollout.groups import Group, build_batch
from termrl.rollout.seeds import derive_seed
from termrl.runs.files import read_jsonl
from termrl.runs.metrics import rollout_metrics
from termrl.runs.store import RunStore
from termrl.sandboxes import open_provider
from termrl.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from termrl.settings import load_settings, to_toml
from termrl.training.advantages import Sample
from termrl.training.events import Silent
from termrl.verifier.verdict import Cause, EndReason
from tests.endtoend.faults import KINDS, FaultyProvider, faulty
from tests.endtoend.tiny import write_tasks


def run_here(world: Path, run: Path, open_sandboxes: Any = open_provider, **overrides: object) -> dict[str, Any]:
    from termrl.training.local import prepare, train

    settings: dict[str, object] = {
        "model.path": world / "model",
        "model.threads": 1,
        "tasks.dir": world / "train",
        "evaluation.dir": world / "held-out",
        "rollout.groups": 2,
        "rollout.samples": 8,
        "episode.max_turns": 2,
        "episode.max_tokens": 4,
        "training.warmup_steps": 0,
        "steps": 2,
    }
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    config = load_settings(TrainConfig, flags=[f"--{key}={value}" for key, value in settings.items()]).config
    model, pools = prepare(config)
    with RunStore.create(run, given="", resolved=to_toml(config)) as store:
        work = train(config, store, Silent(), model=model, pools=pools, open_sandboxes=open_sandboxes)
        return asyncio.run(work)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(run / "metrics.jsonl") if record["phase"] == "train"]


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(sorted((run / "tokens").iterdir())[step - 1]).to_pylist()


@pytest.fixture(scope="module")
def shaken(world: Path) -> tuple[Path, dict[str, Any], FaultyProvider]:
    """Groups of 8 at temperature 0.6, with a fault in one sandbox of twenty: by this seed one of each kind."""
    made: list[FaultyProvider] = []
    overrides = {"sampling.temperature": 0.6, "rollout.groups": 3, "rollout.retries": 0}
    summary = run_here(world, world / "shaken", faulty(0.05, 230, made), **overrides)
    return world / "shaken", summary, made[0]


def test_one_failure_takes_one_sample_and_the_group_trains_on_a_baseline_without_it(
    shaken: tuple[Path, dict[str, Any], FaultyProvider],
) -> None:
    """miles#2800, #2801."""
    run, summary, provider = shaken
    episodes = [record for record in read_jsonl(run / "episodes.jsonl") if record["phase"] == "train"]
    lost = [episode for episode in episodes if episode["reward"] is None]
    assert len(episodes) == 48
    assert sorted(episode["cause"] for episode in lost) == sorted(KINDS) == sorted(summary["dropped"])
    assert all(count == 1 for count in provider.injected.values())
    ragged = 0
    for key in {(episode["step"], episode["group"]) for episode in lost}:
        group = [episode for episode in episodes if (episode["step"], episode["group"]) == key]
        rest = [episode for episode in group if episode["reward"] is not None]
        mean = sum(episode["reward"] for episode in rest) / len(rest)
        assert len(group) == 8 > len(rest) > 4
        assert [e["advantage"] for e in rest] == pytest.approx([e["reward"] - mean for e in rest], abs=1e-9)
        assert not any(e["trained"] or e["advantage"] for e in group if e["reward"] is None)
        if 0 < mean < 1:
            ragged += 1
            assert all(episode["trained"] for episode in rest)
    assert ragged, "a group that lost an episode did train"


def test_logprobs_at_temperature_06_are_those_of_the_sampling(
    world: Path, shaken: tuple[Path, dict[str, Any], FaultyProvider]
) -> None:
    """trl#4159."""
    import torch
    from transformers import AutoModelForCausalLM

    run, summary, _ = shaken
    assert summary["logprob_diff"] <= 1e-4
    assert [step["train/clip_fraction"] for step in steps_of(run)] == [0, 0]
    model = AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32)
    ratios: dict[float, list[float]] = {0.6: [], 1.0: []}
    for row in [row for row in rows_of(run, 1) if sum(row["loss_mask"])][:8]:
        assert row["temperature"] == 0.6
        ids = torch.tensor([row["token_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        mask = torch.tensor(row["loss_mask"][1:], dtype=torch.bool)
        captured = torch.tensor(row["logprobs"][1:])[mask]
        for temperature, own in ratios.items():
            new = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, 1:, None])[:, 0][mask]
            own += (new - captured).exp().tolist()
    assert max(abs(ratio - 1) for ratio in ratios[0.6]) <= 1e-3
    assert max(abs(ratio - 1) for ratio in ratios[1.0]) > 0.05, "the temperature does make a difference"


def test_any_recorded_turn_can_be_sampled_again_alone_from_its_record(
    world: Path, shaken: tuple[Path, dict[str, Any], FaultyProvider]
) -> None:
    """AReaL#1523."""
    from termrl.agent.episode import turn_seed
    from termrl.engine.transformers import EmbeddedEngine

    run = shaken[0]
    engine = EmbeddedEngine(world / "model", threads=1)
    episodes = {(e["group"], e["sample"]): e for e in read_jsonl(run / "episodes.jsonl") if e["step"] == 1}
    rows = [row for row in rows_of(run, 1) if sum(row["loss_mask"])]
    seen: set[tuple[int, ...]] = set()
    for row in rows:
        turn = episodes[row["group"], row["sample"]]["turns"][0]
        places = [derive_seed(0, 1, row["task_id"], row["sample"] + 8 * n) for n in range(3)]
        assert turn["seed"] in {turn_seed(seed, 0) for seed in places}, "n: how often the step had the task before"
        start = row["loss_mask"].index(1)
        sampled = tuple(row["token_ids"][start : start + turn["completion_tokens"]])
        sampling = SamplingParams(0.6, max_tokens=4, seed=turn["seed"], stop_token_ids=(0, 2), stop_at_fence=True)
        (again,) = engine.generate([GenerateRequest("again", tuple(row["token_ids"][:start]), sampling)])
        assert (again.token_ids, again.finish_reason) == (sampled, turn["finish_reason"])
        seen.add(sampled)
    assert len(seen) > 4, "turns differ, so that a replay says something"


def test_every_trained_row_begins_with_its_own_tasks_text(
    world: Path, shaken: tuple[Path, dict[str, Any], FaultyProvider]
) -> None:
    """trl#6067, with the real engine."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    rows = [row for row in rows_of(shaken[0], 1) if row["token_ids"]]
    assert {row["task_id"] for row in rows} == {"make-apple", "make-berry"}
    for row in rows:
        prompt = tokenizer.decode(row["token_ids"][: row["loss_mask"].index(1)])
        assert f"Make a directory named {row['task_id'].removeprefix('make-')}." in prompt.rpartition("user\n")[2]


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_batch_that_is_masked_whole_has_no_nan_in_any_figure(world: Path, kl_coef: float) -> None:
    """unsloth-zoo#1262."""
    from termrl.training.config import TrainingConfig
    from termrl.training.grpo import update_metrics
    from termrl.training.trainer import Trainer

    def cut(reward: float) -> Episode:
        segment = Segment("s", (5, 6, 7), (0, 1, 1), (0.0, -0.5, -0.5), (-1, 0, 0), 0.8, 1)
        return Episode("t", 0, end_reason=EndReason.LENGTH, reward=reward, segments=(segment,))

    config = TrainingConfig(mask_truncated=True, warmup_steps=0, kl_coef=kl_coef)
    trainer = Trainer(world / "model", config, seed=0, threads=1)
    before = {name: tensor.clone() for name, tensor in trainer.merged_weights().items()}
    groups = [Group(0, "t", "f", (cut(1.0), cut(0.0)))]
    batch = build_batch(groups, mask_truncated=True)
    empty = Sample((), 1.0, 1, 0)
    for samples in (batch.samples, [*batch.samples, empty], [empty], []):
        update = trainer.update(samples)
        assert update.skipped == ("no_loss_token" if samples else "no_episode")
        assert update.optimiser_steps == 0
        figures = {**rollout_metrics(groups, batch), **update_metrics(update), **vars(update)}
        assert all(math.isfinite(value) for value in figures.values() if isinstance(value, float))
    assert all((tensor == before[name]).all() for name, tensor in trainer.merged_weights().items())


def test_groups_that_all_fail_are_left_out_counted_and_end_the_run_with_the_reason(world: Path) -> None:
    """ms-swift#4570."""
    tasks = write_tasks(world / "hopeless", ("apple", "berry"), test="echo 0 > /logs/verifier/reward.txt\n")
    run = world / "all-fail"
    with pytest.raises(RunError, match="no group of the last 2 steps had both passes and failures"):
        run_here(world, run, **{"tasks.dir": tasks}, stop__dead_steps=2, steps=50)
    steps = steps_of(run)
    assert [step["rollout/zero_variance_groups"] for step in steps] == [2, 2]
    assert all(step["train/skipped"] == 1 and "train/loss" not in step for step in steps)
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert "no gradient" in summary["stopped"] and summary["tokens_trained"] == 0
    assert summary["tokens_masked_by_reason"] == {"zero_variance": summary["tokens_captured"]}


class BreaksAfter(SandboxProvider):
    """A real provider that makes so many sandboxes and then no more."""

    name = "breaking"

    def __init__(self, inner: SandboxProvider, count: int) -> None:
        self.inner = inner
        self.count = count

    def refusal(self, spec: SandboxSpec) -> str | None:
        return self.inner.refusal(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.count -= 1
        if self.count < 0:
            raise SandboxStartError(f"{spec.task_id}: no space left on device")
        return await self.inner.create(spec)

    async def close(self) -> None:
        await self.inner.close()

    @property
    def live(self) -> int:
        return self.inner.live


def test_sandboxes_that_break_in_mid_run_end_it_with_the_cause_and_score_nothing_0(world: Path) -> None:
    """prime-rl#3015; the streak of cap-evolve#306."""
    run = world / "broken"
    with pytest.raises(RunError, match=r"no episode of the last 2 steps got a verdict \(\d+ sandbox_start\)"):
        run_here(world, run, lambda name, **s: BreaksAfter(open_provider(name, **s), 1 + 16), steps=50)
    steps = steps_of(run)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all("rollout/pass_rate" not in step and step["train/skipped"] == 1 for step in steps[1:])
    lost = [record for record in read_jsonl(run / "episodes.jsonl") if record["step"] > 1]
    assert {(e["reward"], e["cause"], e["end_reason"]) for e in lost} == {(None, "sandbox_start", "environment_error")}
    assert {e["error"] for e in lost} == {f"make-{word}: no space left on device" for word in ("apple", "berry")}
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert summary["dropped"] == {str(Cause.SANDBOX_START): 32} and "sandbox_start" in summary["stopped"]


def test_an_engine_whose_token_ids_are_stripped_ends_the_run_at_once(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ProRL-Server#52."""
    from termrl.engine.upstream import EmbeddedUpstream

    generate = EmbeddedUpstream.generate

    async def stripped(self: EmbeddedUpstream, request: GenerateRequest) -> GenerateResult:
        return replace(await generate(self, request), token_ids=(), logprobs=())

    monkeypatch.setattr(EmbeddedUpstream, "generate", stripped)
    with pytest.raises(RunError, match=r"no episode of the evaluation got a verdict \(1 engine_error\).*no token ids"):
        run_here(world, world / "stripped")
    summary = orjson.loads((world / "stripped" / "summary.json").read_bytes())
    assert "no token ids" in summary["stopped"] and summary["tokens_captured"] == 0
