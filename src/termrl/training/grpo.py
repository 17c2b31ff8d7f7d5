"""GRPO, the whole loop: evaluate, then for each step roll out groups, take advantages, update, renew the engine.

Group relative policy optimisation (arXiv:2402.03300) with the choices of DAPO (arXiv:2503.14476) and Dr. GRPO
(arXiv:2503.20783) as settings. The parts are given (see :mod:`termrl.training.local`): this module only says what
happens in which order, what is recorded, and when a run ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from termrl.agent.types import Episode
from termrl.config import TrainConfig
from termrl.errors import RunError
from termrl.rollout.curriculum import Curriculum, family_levels, pick_refills, pick_tasks
from termrl.rollout.groups import Batch, Group, build_batch
from termrl.rollout.pools import TaskPools
from termrl.rollout.scheduler import Attempt, Scheduler
from termrl.rollout.seeds import derive_seed
from termrl.runs.metrics import (
    EvalScores,
    Timings,
    capture_metrics,
    eval_metrics,
    perf_metrics,
    rollout_metrics,
    score_families,
)
from termrl.runs.progress import Progress
from termrl.runs.records import episode_record
from termrl.runs.store import RunStore, TokenRow
from termrl.tasks.task import Task
from termrl.training.advantages import Sample
from termrl.training.events import Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from termrl.engine.transformers import EngineStats
    from termrl.training.trainer import UpdateMetrics


class Learner(Protocol):
    """What turns a batch into new weights; :class:`termrl.training.trainer.Trainer` is one."""

    def update(self, samples: Sequence[Sample]) -> UpdateMetrics:
        """One policy update; an empty batch is skipped, with the reason."""
        ...

    def merged_weights(self) -> Mapping[str, Tensor]:
        """The changed weights, by their transformers names."""
        ...


class Engine(Protocol):
    """What samples the policy; :class:`termrl.engine.transformers.EmbeddedEngine` is one."""

    def set_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Sample from these weights from now on."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Running totals of its work."""
        ...


class Saver(Protocol):
    """Where checkpoints go; :class:`termrl.training.local.Checkpoints` is one."""

    def save(self, step: int, progress: Mapping[str, Any], *, score: float | None) -> None:
        """Keep weights, optimiser state and ``progress`` after ``step``, atomically."""
        ...

    def annotate(self, step: int, progress: Mapping[str, Any] | None = None, *, score: float | None) -> None:
        """Renew the progress and the score that were kept with the weights after ``step``, atomically."""
        ...


@dataclass(frozen=True)
class Parts:
    """What the loop drives."""

    learner: Learner
    engine: Engine
    scheduler: Scheduler
    pools: TaskPools
    saver: Saver


class GRPO:
    """One training run. ``progress`` is where it stands: new, or what a checkpoint brought back."""

    def __init__(
        self, config: TrainConfig, parts: Parts, store: RunStore, progress: Progress, watcher: Watcher
    ) -> None:
        self._config = config
        self._parts = parts
        self._store = store
        self._progress = progress
        self._watcher = watcher
        self._saved = -1 if progress.logs is None else progress.step
        self._levels: dict[str, int] = {}
        if config.tasks.curriculum.enabled:
            self._levels = family_levels(parts.pools.train)
            progress.curriculum = progress.curriculum or Curriculum.begin(self._levels)

    async def run(self) -> None:
        """Train to the end; ``progress`` holds the outcome.

        Raises:
            RunError: nothing can be learnt (no verdicts, no commands, no group with a signal), and why.
            CancelledError: interrupted; the last finished step has been checkpointed.
        """
        config, progress = self._config, self._progress
        self._parts.engine.set_weights(self._parts.learner.merged_weights(), progress.step)
        try:
            if progress.before is None:
                progress.before = await self._evaluate("before")
                self._save()
            while progress.step < config.steps and not self._ends_early():
                self._forget_ending()
                if self._evaluation_due():
                    progress.during[progress.step] = await self._evaluate(f"at step {progress.step}")
                    self._save()
                step = progress.step + 1
                started = time.monotonic()
                groups = await self._roll_out(step)
                # from here to the checkpoint nothing is awaited: an interrupt cannot come between the parts of a step
                self._learn(step, groups, started)
                if step % config.checkpoint.every == 0 or step == config.steps:
                    self._save()
            if progress.after is None:
                progress.trained_logs = self._store.mark()
                progress.after = await self._evaluate("after") if progress.step else progress.before
                self._save()
        except (asyncio.CancelledError, RunError):
            if progress.step > max(self._saved, 0):
                self._save()
            raise

    async def _roll_out(self, step: int) -> list[Group]:
        """The step's groups: ``samples`` episodes of each of ``groups`` tasks, on the current weights.

        With ``refill``, further groups of other tasks follow until ``groups`` of them have a signal or the bound is
        reached. What they replace is recorded and counted, as without them.
        """
        config, train = self._config, self._parts.pools.train
        curriculum = self._progress.curriculum
        stages = curriculum.stages(self._levels) if curriculum is not None else None
        tasks = pick_tasks(train, step=step, count=config.rollout.groups, seed=config.seed, stages=stages)
        groups = await self._play(step, tasks, [])
        if not config.rollout.refill:
            return groups
        used = {task.id for task in tasks}
        count = config.rollout.refill
        spare = pick_refills(train, step=step, count=count, seed=config.seed, used=used, stages=stages)
        while spare and (flat := sum(group.dead == "zero_variance" for group in groups) - len(groups) + len(tasks)) > 0:
            groups += await self._play(step, spare[:flat], groups)
            spare = spare[flat:]
        return groups

    async def _play(self, step: int, tasks: Sequence[Task], earlier_groups: Sequence[Group]) -> list[Group]:
        """One group for each task, numbered after the step's ``earlier_groups``."""
        config, base = self._config, len(earlier_groups)
        n = config.rollout.samples
        attempts: list[Attempt] = []
        for group, task in enumerate(tasks, base):
            first = n * sum(earlier.id == task.id for earlier in tasks[: group - base])  # a task may come twice
            for place in range(n):
                seed = derive_seed(config.seed, step, task.id, first + place)
                attempts.append(Attempt(task.id, task.family, group, place, seed, order=group * n + place))
        self._watcher.phase("rollout", step=step, total=len(attempts))
        episodes = await self._parts.scheduler.run(
            attempts,
            limits=config.episode.limits(evaluating=False),
            temperature=config.sampling.temperature,
            on_end=self._watcher.episode,
        )
        return [
            Group(base + place, task.id, task.family, tuple(episodes[place * n : (place + 1) * n]))
            for place, task in enumerate(tasks)
        ]

    def _learn(self, step: int, groups: Sequence[Group], started: float) -> None:
        """Advantages, update, new weights in the engine, and the step's record."""
        training = self._config.training
        rolled_out = time.monotonic()
        generation_s = self._engine_s() - self._progress.engine_s
        batch = build_batch(groups, scale=training.advantage_scale, mask_truncated=training.mask_truncated)
        self._watcher.phase("update", step=step, total=0)
        update = self._parts.learner.update(batch.samples)
        if update.skipped is not None:
            batch.skip(update.skipped)
        self._parts.engine.set_weights(self._parts.learner.merged_weights(), step)
        ended = time.monotonic()
        timings = Timings(ended - started, rolled_out - started, generation_s, ended - rolled_out)

        episodes = [episode for group in groups for episode in group.episodes]
        refilled = len(groups) - self._config.rollout.groups
        metrics = {
            **rollout_metrics(groups, batch, refilled=refilled),
            **capture_metrics(episodes),
            **update_metrics(update),
        }
        metrics |= perf_metrics(timings, episodes=len(episodes), tokens=int(metrics["rollout/tokens_captured"]))
        curriculum = self._progress.curriculum
        if curriculum is not None:
            metrics["rollout/level"] = curriculum.level
        self._score_previous(step, metrics.get("rollout/raw_reward"))
        self._record(step, groups, batch, metrics)
        self._progress.finish_step(step, metrics, batch)
        if curriculum is not None and curriculum.finish_step(step, groups, self._levels, self._config.tasks.curriculum):
            self._progress.moved_up()
        self._progress.engine_s = self._engine_s()
        self._watcher.step(step, metrics)

    async def _evaluate(self, name: str) -> EvalScores:
        """Run every held-out task once and record it; ``name`` is ``before``, ``after`` or where training stands."""
        config, step, tasks = self._config, self._progress.step, self._parts.pools.held_out
        # the seed leaves the step out: before and after draw the same numbers, so their difference is the weights'
        attempts = [
            Attempt(task.id, task.family, index, 0, seed=derive_seed(config.seed, "evaluation", task.id), order=index)
            for index, task in enumerate(tasks)
        ]
        self._watcher.phase("evaluate", step=step, total=len(attempts))
        started = time.monotonic()
        temperature = config.evaluation.temperature
        episodes = await self._parts.scheduler.run(
            attempts,
            limits=config.episode.limits(evaluating=True),
            temperature=config.sampling.temperature if temperature is None else temperature,
            on_end=self._watcher.episode,
        )
        self._progress.evaluation_s = time.monotonic() - started
        self._progress.engine_s = self._engine_s()
        scores = score_families(episodes, [task.family for task in tasks], untrained=self._parts.pools.untrained)
        self._store.append_episodes(
            [
                episode_record(episode, phase="eval", step=step, family=task.family, group=index, sample=0)
                for index, (task, episode) in enumerate(zip(tasks, episodes, strict=True))
            ]
        )
        self._store.append_metrics({"step": step, "phase": "eval", "name": name, **eval_metrics(scores)})
        self._watcher.evaluated(name, scores)
        _check_evaluation(episodes, scores)
        return scores

    def _record(self, step: int, groups: Sequence[Group], batch: Batch, metrics: Mapping[str, float]) -> None:
        records: list[dict[str, Any]] = []
        rows: list[TokenRow] = []
        for group in groups:
            for place, episode in enumerate(group.episodes):
                advantage = batch.advantages[group.index, place]
                trained = (group.index, place) in batch.trained
                records.append(
                    episode_record(
                        episode,
                        phase="train",
                        step=step,
                        family=group.family,
                        group=group.index,
                        sample=place,
                        advantage=advantage,
                        trained=trained,
                    )
                )
                rows += [
                    TokenRow(step, group.index, place, episode.task_id, episode.reward, advantage, trained, segment)
                    for segment in episode.segments
                ]
        self._store.write_tokens(step, rows)
        self._store.append_episodes(records)
        self._store.append_metrics({"step": step, "phase": "train", **metrics})

    def _evaluation_due(self) -> bool:
        every, step = self._config.evaluation.every, self._progress.step
        return every > 0 and step > 0 and step % every == 0 and step not in self._progress.during

    def _ends_early(self) -> bool:
        """Whether training is over before its last step: solved, or out of time.

        Raises:
            RunError: nothing can be learnt.
        """
        progress, stop = self._progress, self._config.stop
        reason = progress.hopeless(stop)
        if reason is not None:
            raise RunError(f"step {progress.step}: {reason}", hint=f"look at {self._store.path / 'episodes.jsonl'}")
        more = progress.curriculum is not None and progress.curriculum.next_level(self._levels) is not None
        if progress.solved_steps >= stop.dead_steps and not more:
            progress.stopped = f"solved: {progress.solved_steps} steps in a row passed every episode"
        limit = self._config.max_wall_s
        if limit is not None and progress.wall_s + progress.longest_step_s + progress.evaluation_s > limit:
            progress.stopped = f"time: another step and the evaluation would not fit in max_wall_s = {limit:g}"
        return progress.stopped is not None

    def _engine_s(self) -> float:
        stats = self._parts.engine.stats
        return stats.prefill_s + stats.decode_s

    def _forget_ending(self) -> None:
        """A run that had ended and now goes on: its last evaluation is not part of the longer run."""
        progress = self._progress
        if progress.after is not None:
            progress.after = None
            self._store.rewind(progress.trained_logs, step=progress.step)

    def _score_previous(self, step: int, reward: float | None) -> None:
        """The rollouts of ``step`` were sampled with the weights after the step before: their reward is its score.

        Where evaluations are made during training, they alone are scores.
        """
        before = step - 1
        if reward is not None and before == self._saved > 0 and self._config.evaluation.every == 0:
            self._parts.saver.annotate(before, score=reward)

    def _save(self) -> None:
        """Keep where the run stands; weights that are kept already get only their score and the progress renewed."""
        progress = self._progress
        progress.logs = self._store.mark()
        keep = self._parts.saver.annotate if self._saved == progress.step else self._parts.saver.save
        keep(progress.step, progress.state(), score=progress.score(progress.step))
        self._saved = progress.step


def update_metrics(update: UpdateMetrics) -> dict[str, float]:
    """``train/*`` and ``rollout/logprob_diff`` of one update; only the token count where it was skipped."""
    if update.skipped is not None:
        return {"train/tokens": 0, "train/skipped": 1}
    return {
        "train/tokens": update.tokens_trained,
        "train/tokens_computed": update.tokens_computed,
        "train/loss": update.loss,
        "train/grad_norm": update.grad_norm,
        "train/clip_fraction": update.clip_fraction,
        "train/sequence_masked": update.sequence_masked,
        "train/kl": update.kl,
        "train/entropy": update.entropy,
        "train/lr": update.lr,
        "rollout/logprob_diff": update.logprob_diff,
        "rollout/logprob_k3": update.logprob_k3,
    }


def _check_evaluation(episodes: Sequence[Episode], scores: EvalScores) -> None:
    """Stop at once when not a single episode of an evaluation got a verdict: the infrastructure is broken."""
    if episodes and all(episode.reward is None for episode in episodes):
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(scores.dropped.items()))
        detail = next((e.error or (e.verdict.detail if e.verdict else "") for e in episodes), "")
        raise RunError(
            f"no episode of the evaluation got a verdict ({causes}): {detail}", hint="termrl doctor checks this machine"
        )
