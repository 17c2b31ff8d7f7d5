"""A training run on this machine: model, engine, session server, sandboxes and trainer in one process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termrl.agent.prompts import opening
from termrl.config import TrainConfig
from termrl.engine.bundled import ensure_model, model_sha256
from termrl.rollout.environments import TASKS, open_environments
from termrl.rollout.pools import TaskPools, check_families, check_runnable, generate_pools, load_pools
from termrl.rollout.scheduler import Scheduler
from termrl.rollout.served import serve_engine
from termrl.runs.ending import told_why
from termrl.runs.inputs import check_inputs
from termrl.runs.metrics import family_table
from termrl.runs.progress import Progress
from termrl.runs.store import RunStore, versions
from termrl.sandboxes import SandboxProvider, open_provider
from termrl.training import checkpoints
from termrl.training.events import Silent, Watcher
from termrl.validation.gate import check_sound

if TYPE_CHECKING:
    from termrl.training.grpo import Parts
    from termrl.training.trainer import Trainer


class Checkpoints:
    """Saves the trainer's state with the loop's progress in the run folder."""

    def __init__(self, run: Path, trainer: Trainer, *, keep: int) -> None:
        self._run = run
        self._trainer = trainer
        self._keep = keep

    def save(self, step: int, progress: Mapping[str, Any], *, score: float | None) -> None:
        """Keep the state after ``step``. ``score`` is how well these weights do, where that is known already."""
        checkpoints.save(self._run, self._trainer, step=step, score=score, loop=progress, keep_last=self._keep)

    def annotate(self, step: int, progress: Mapping[str, Any] | None = None, *, score: float | None) -> None:
        """Renew progress and score of the checkpoint of ``step``; ``None`` leaves what is there."""
        checkpoints.annotate(self._run, step, score=score, loop=progress)


def prepare(config: TrainConfig, say: Callable[[str], None] = lambda line: None) -> tuple[Path, TaskPools | None]:
    """Everything that can be refused before a run folder is made: model, families, task folders, environments.

    Args:
        say: told what is odd or waited for about an environment server.

    Returns:
        The model's folder, and the task pools where they come from folders (the bundled suite is written later).

    Raises:
        TermrlError: whatever is wrong with any of them.
    """
    check_families(config)
    opening(config.episode.opening)
    pools = load_pools(config) if config.tasks.dir is not None else None
    check_sound(config.tasks.reports(), pools.by_id if pools is not None else {})
    if config.environment.url is None:
        asyncio.run(_check_sandbox(config, pools))
    else:
        _check_server(config, pools, say)
    return ensure_model(config.model.path), pools


def _check_server(config: TrainConfig, pools: TaskPools | None, say: Callable[[str], None]) -> None:
    from termrl.rollout.preflight import check_server

    with tempfile.TemporaryDirectory(prefix="termrl-") as folder:
        pools = pools or generate_pools(config, Path(folder))
        most = max(config.rollout.groups * config.rollout.samples, len(pools.held_out))
        sessions, lockstep = min(config.rollout.concurrency, most), config.rollout.schedule == "lockstep"
        asyncio.run(check_server(config.environment, pools.by_id, sessions=sessions, lockstep=lockstep, say=say))


async def _check_sandbox(config: TrainConfig, pools: TaskPools | None) -> None:
    async with open_provider(config.sandbox.backend, **config.sandbox_settings()) as provider:
        if pools is not None:
            check_runnable(pools.by_id, provider)


async def train(
    config: TrainConfig,
    store: RunStore,
    watcher: Watcher,
    *,
    model: Path,
    pools: TaskPools | None = None,
    resume: bool = False,
    open_sandboxes: Callable[..., SandboxProvider] = open_provider,
) -> dict[str, Any]:
    """Run GRPO to its end, write ``summary.json`` (also when it fails or is interrupted) and return the summary.

    Args:
        config: the resolved config.
        store: the run's folder, held by this process.
        watcher: told what happens.
        model, pools: from :func:`prepare`.
        resume: go on from the newest checkpoint; what was recorded after it is forgotten and done again. A run that
            was killed before its first checkpoint begins again.
        open_sandboxes: makes the sandbox provider; takes what :func:`termrl.sandboxes.open_provider` takes.

    Raises:
        RunError: nothing can be learnt, or the model or the tasks are not those that the run began with; the summary
            says why.
        CancelledError: interrupted; the last finished step is checkpointed.
    """
    from termrl.training.grpo import GRPO

    saved = checkpoints.latest(store.path) if resume else None
    checkpoint = checkpoints.load(saved) if saved is not None else None
    progress = Progress.from_state(checkpoint.loop) if checkpoint is not None else Progress()
    if pools is None:
        pools = _bundled_pools(config, store.path / TASKS)
        check_sound(config.tasks.reports(), pools.by_id)
    base = {"name": config.model.path, "sha256": model_sha256(model)}
    check_inputs(store.path, model=base["sha256"], tasks=pools.by_id)
    if resume:
        store.rewind(progress.logs, step=progress.step)
    watcher.started(store.path, steps=config.steps, first_step=progress.step + 1)
    try:
        with told_why(progress):
            parts_of_run = open_parts(config, store.path, model, pools, checkpoint, watcher, open_sandboxes)
            async with parts_of_run as parts:
                await GRPO(config, parts, store, progress, watcher).run()
    finally:
        summary = summarise(config, store.path, progress, base)
        store.write_summary(summary)
    watcher.finished(summary, progress.rewards)
    return summary


@asynccontextmanager
async def open_parts(
    config: TrainConfig,
    run: Path,
    model: Path,
    pools: TaskPools,
    checkpoint: checkpoints.Checkpoint | None = None,
    watcher: Watcher | None = None,
    open_sandboxes: Callable[..., SandboxProvider] = open_provider,
) -> AsyncIterator[Parts]:
    """Open everything that the loop drives; all of it is closed on every path, environments last.

    Closing is bounded: what does not end in time is left to the process's own end.
    """
    from termrl.engine.transformers import EmbeddedEngine
    from termrl.training.grpo import Parts
    from termrl.training.trainer import Trainer

    async with AsyncExitStack() as stack:
        # first, so that a server starts while the model is loaded
        opened = open_environments(config, pools.by_id, run, open_sandboxes=open_sandboxes)
        environments = await stack.enter_async_context(opened)
        trainer = Trainer(
            model, config.training, seed=config.seed, threads=config.model.threads, base_id=config.model.path
        )
        if checkpoint is not None:
            trainer.load_state_dict(checkpoint.trainer)
        engine = EmbeddedEngine(model, threads=config.model.threads)
        await environments.ready()
        (watcher or Silent()).sandboxes(environments.live)
        served = await stack.enter_async_context(
            serve_engine(engine, model, schedule=config.rollout.schedule, stop_at_fence=config.episode.stop_at_fence)
        )
        scheduler = Scheduler(
            environments=environments.factory,
            sessions=served.sessions,
            gate=served.gate,
            opening=opening(config.episode.opening),
            concurrency=config.rollout.concurrency,
            bounds=config.bounds(),
            retries=config.rollout.retries,
            recover=environments.recover,
        )
        saver = Checkpoints(run, trainer, keep=config.checkpoint.keep)
        yield Parts(trainer, engine, scheduler, pools, saver)


def summarise(config: TrainConfig, run: Path, progress: Progress, base: Mapping[str, Any]) -> dict[str, Any]:
    """``summary.json``. ``tokens_trained`` = ``tokens_captured`` - ``tokens_masked``, to the token."""
    totals, before, after = progress.totals, progress.before, progress.after
    opened = progress.curriculum.opened if progress.curriculum is not None else None
    return {
        "eval_before": before.overall() if before else None,
        "eval_after": after.overall() if after else None,
        "eval_before_untrained": before.overall(untrained=True) if before else None,
        "eval_after_untrained": after.overall(untrained=True) if after else None,
        "eval_by_family": family_table(before, after),
        "eval_dropped": {"before": before.dropped if before else {}, "after": after.dropped if after else {}},
        # level → the first step that trained on it
        **({"levels": {str(k): at for k, at in opened.items() if at <= totals.steps}} if opened is not None else {}),
        "steps": totals.steps,
        "episodes": totals.episodes,
        "dropped": dict(totals.dropped),
        "retried": dict(totals.retried),
        "tokens_trained": totals.tokens_trained,
        "tokens_captured": totals.tokens_captured,
        "tokens_masked": sum(totals.masked.values()),
        "tokens_masked_by_reason": dict(totals.masked),
        "logprob_diff": totals.logprob_diff,
        "re_rendered_turns": totals.re_rendered_turns,
        "branches": totals.branches,
        "rewards": [progress.rewards.get(step) for step in range(1, totals.steps + 1)],
        "wall_s": round(progress.wall_s, 3),
        "stopped": progress.stopped,
        "seed": config.seed,
        "base": dict(base),
        "note": "an adapter of this run belongs to exactly this base; termrl export --merged writes a model that "
        "stands alone",
        "training": config.training.model_dump(mode="json"),
        "run_dir": str(run),
        "versions": versions(),
    }


def _bundled_pools(config: TrainConfig, folder: Path) -> TaskPools:
    """The bundled suite's tasks, written into the run folder (again, if a resumed run finds them incomplete)."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    return generate_pools(config, folder)
