"""The settings of a training run, one model per concern, composed into :class:`TrainConfig`.

The TOML file has the same shape: top-level keys first, then one table per concern. ``termrl train --keys``
lists all keys; :func:`termrl.settings.load_settings` fills them from files, environment and flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from termrl.agent.types import Limits
from termrl.environment.address import Address
from termrl.environment.remote_config import RemoteSettings
from termrl.errors import ConfigError
from termrl.rollout.bounded import Bounds
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.training.config import TrainingConfig
from termrl.verifier.attribution import MissingVerdict
from termrl.verifier.rules import DEFAULT_RECHECK_ON, VerifyRules
from termrl.verifier.signals import Signal

BUNDLED_MODEL = "smollm2-135m-instruct"


class Section(BaseModel):
    """A table of settings: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """Which model is trained."""

    path: str = Field(
        default=BUNDLED_MODEL, description="the bundled model's name, a hub id, or a folder in transformers form"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of engine and trainer; none: one per core")


class CurriculumConfig(Section):
    """When a run that begins with the lowest level of its tasks takes in the next one."""

    enabled: bool = Field(
        default=False, description="begin with the lowest level; take in the next once the highest open one passes"
    )
    threshold: float = Field(default=0.8, gt=0, le=1, description="pass rate of the highest open level that opens one")
    window: int = Field(
        default=3, ge=1, description="steps that met that level since it opened, over which its pass rate is taken"
    )


class TasksConfig(Section):
    """What is trained on: the bundled suite's families, or a folder of Harbor tasks."""

    dir: Path | None = Field(default=None, description="folder of Harbor tasks; none: the bundled suite first-steps")
    families: tuple[str, ...] = Field(default=(), description="families to train on; empty: all trainable ones")
    levels: tuple[int, ...] = Field(
        default=(),
        description="only families of these levels; empty: any level of those named, else level 1 (bundled suite), "
        "every level with a curriculum",
    )
    per_family: int | None = Field(
        default=None,
        ge=1,
        description="tasks to generate per family (bundled suite only); none: as many as the run uses",
    )
    skip_broken: bool = Field(
        default=False, description="leave broken task folders out instead of refusing the whole set"
    )
    validation: tuple[Path, ...] = Field(
        default=(),
        description="reports of termrl validate: every task, held-out ones too, must be sound by one of them",
    )
    allow_unsound: bool = Field(default=False, description="take tasks that the reports do not call sound, too")
    curriculum: CurriculumConfig = CurriculumConfig()

    def reports(self) -> tuple[Path, ...]:
        """The reports that tasks are held against."""
        return () if self.allow_unsound else self.validation


class EvaluationConfig(Section):
    """What is measured before, after and, if wished, during training. Held-out tasks only."""

    dir: Path | None = Field(default=None, description="folder of Harbor tasks to evaluate on; required with tasks.dir")
    families: tuple[str, ...] = Field(
        default=(), description="trained families to evaluate; empty: all that are trained on"
    )
    untrained_families: tuple[str, ...] = Field(default=(), description="families evaluated apart, never trained on")
    per_family: int = Field(
        default=8, ge=1, description="held-out tasks per family, one episode each (bundled suite only)"
    )
    every: int = Field(default=0, ge=0, description="also evaluate after every so many steps; 0: only before and after")
    temperature: float | None = Field(default=None, ge=0, description="sampling temperature; none: that of training")


class SandboxConfig(Section):
    """Where episodes run."""

    backend: str = Field(default="bubblewrap", description="which sandbox provider")
    settings: dict[str, Any] = Field(default={}, description="settings of that provider, passed on as they are")

    def provider_settings(self, images: ImageSettings) -> dict[str, Any]:
        """What :func:`termrl.sandboxes.open_provider` is given for ``backend``."""
        return {**({"images": images} if self.backend == "docker" else {}), **self.settings}


class EnvironmentConfig(RemoteSettings):
    """Where environments are: in this process, or behind an OpenEnv server (docs/openenv.md)."""

    url: str | None = Field(
        default=None, description="OpenEnv server that runs the environments; also --env-url; none: see serve"
    )
    serve: bool = Field(
        default=False,
        description="without a url: start `termrl serve` for this run, which ends with it; false: no server",
    )

    @property
    def remote(self) -> bool:
        """Whether environments are behind a server."""
        return self.serve or self.url is not None

    @field_validator("url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is not None:
            try:
                Address.of(url)
            except ConfigError as error:
                raise ValueError(error.message) from None
        return url


class EpisodeConfig(Section):
    """What bounds one episode and how its conversation opens. Times are seconds, sizes tokens or characters."""

    opening: str = Field(default="first-steps", description="system prompt and demonstrations, by name")
    max_turns: int = Field(default=3, ge=1)
    max_tokens: int = Field(default=24, ge=1, description="new tokens in one turn")
    context_window: int | None = Field(
        default=None, ge=16, description="tokens of a whole conversation; none: the model's"
    )
    wall_s: float | None = Field(
        default=None, gt=0, description="engine service + exec; min with the task's own timeout"
    )
    command_timeout_s: float = Field(default=10.0, gt=0)
    output_chars: int = Field(default=600, ge=20, description="characters of one command's output that go back")
    max_format_errors: int = Field(
        default=2, ge=0, description="replies without a runnable command before the episode ends"
    )
    verify_timeout_s: float | None = Field(default=None, gt=0, description="none: the task's own")
    reset_s: float = Field(default=600.0, gt=0, description="an environment that takes longer to start is lost")
    grace_s: float = Field(
        default=60.0, gt=0, description="an environment that answers so much later than it should is lost"
    )
    stop_at_fence: bool = Field(default=True, description="end a turn once its command block is closed")
    lenient: bool = Field(default=False, description="the reply parser's lenient mode")

    def limits(self, *, evaluating: bool) -> Limits:
        """The agent's limits; in evaluation an episode cut by the wall cap is still graded."""
        return Limits(
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            context_window=self.context_window,
            wall_s=self.wall_s,
            command_timeout_s=self.command_timeout_s,
            output_chars=self.output_chars,
            max_format_errors=self.max_format_errors,
            verify_timeout_s=self.verify_timeout_s,
            grade_cut=evaluating,
            lenient=self.lenient,
        )


class VerifyConfig(Section):
    """What is made of missing verdicts and of tamper signals (docs/verdicts.md lists the signals)."""

    zero_on: tuple[Signal, ...] = Field(default=(), description="tamper signals that make any reward a 0")
    recheck_on: tuple[Signal, ...] = Field(
        default=tuple(sorted(DEFAULT_RECHECK_ON)),
        description="tamper signals with which a pass must hold in an untouched sandbox too",
    )
    missing_verdict: MissingVerdict = Field(
        default="attribute", description="attribute: ask untouched sandboxes whose fault it is; drop: never a reward"
    )

    def rules(self) -> VerifyRules:
        """The verifier's rules."""
        return VerifyRules(frozenset(self.zero_on), frozenset(self.recheck_on), self.missing_verdict)


class SamplingConfig(Section):
    """How the policy samples. Training refuses what its loss cannot account for."""

    temperature: float = Field(default=0.8, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _only_what_the_loss_models(self) -> Self:
        if self.top_p != 1.0:
            raise ValueError("sampling.top_p must be 1 in training: a truncated distribution has other logprobs")
        return self


class RolloutConfig(Section):
    """How many episodes a step has and how they are scheduled."""

    groups: int = Field(default=8, ge=1, description="tasks per step")
    samples: int = Field(default=8, ge=2, description="episodes per task, which share a baseline")
    refill: int = Field(
        default=0,
        ge=0,
        description="further groups a step may play, of other tasks, in place of groups whose rewards are all equal",
    )
    schedule: Literal["lockstep", "continuous"] = Field(
        default="lockstep",
        description="lockstep: turns are decoded in one ordered batch, so a run repeats bit for bit; continuous: turns "
        "join the running batch as they come, nothing waits for a slow command",
    )
    concurrency: int = Field(default=64, ge=1, description="episodes, hence sandboxes, alive at once")
    retries: int = Field(
        default=1, ge=0, le=10, description="times an episode that lost its environment is played again, from its start"
    )


class CheckpointConfig(Section):
    """When weights and optimiser state are written, and how many are kept beside the best."""

    every: int = Field(default=1, ge=1, description="steps between checkpoints")
    keep: int = Field(default=2, ge=1)


class StopConfig(Section):
    """When a run that cannot learn ends by itself."""

    no_action_steps: int = Field(default=2, ge=1, description="steps in which no episode ran a single command")
    dead_steps: int = Field(
        default=6, ge=1, description="steps in a row without a group that has both passes and failures"
    )
    no_verdict_steps: int = Field(default=2, ge=1, description="steps in a row in which no episode got a verdict")
    engine_s: float = Field(
        default=900.0, gt=0, description="an engine that gives no turn for so long, while it alone is waited for, hangs"
    )
    phase_s: float | None = Field(
        default=None, gt=0, description="bound on one rollout or evaluation: what still runs then has no verdict"
    )


class TrackConfig(Section):
    """Who else is told a run's figures, beside ``metrics.jsonl``. Credentials are never settings."""

    to: Literal["none", "wandb", "tensorboard", "trackio"] = Field(
        default="none", description="experiment tracker; also --track NAME"
    )
    project: str = Field(default="termrl", min_length=1, description="what the tracker files the run under")
    prometheus_port: int | None = Field(
        default=None, ge=1, le=65535, description="serve /metrics on this port; also --prometheus-port N; none: do not"
    )
    prometheus_host: str = Field(
        default="127.0.0.1", min_length=1, description="address to serve /metrics on; anyone who reaches it can read"
    )


class TrainConfig(Section):
    """Everything that ``termrl train`` takes."""

    run_dir: Path | None = Field(default=None, description="the run's new folder; none: runs/<name>-<time>")
    steps: int = Field(default=15, ge=0)
    seed: int = Field(default=0, ge=0)
    max_wall_s: float | None = Field(
        default=None, gt=0, description="end training early so that the whole run fits in this"
    )
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sandbox: SandboxConfig = SandboxConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    images: ImageSettings = ImageSettings()
    episode: EpisodeConfig = EpisodeConfig()
    verify: VerifyConfig = VerifyConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    track: TrackConfig = TrackConfig()

    def sandbox_settings(self) -> dict[str, Any]:
        """What :func:`termrl.sandboxes.open_provider` is given for ``sandbox.backend``."""
        return self.sandbox.provider_settings(self.images)

    def bounds(self) -> Bounds:
        """How long a rollout or an evaluation waits for environments and engine."""
        return Bounds(self.episode.reset_s, self.episode.grace_s, self.stop.engine_s, self.stop.phase_s)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.tasks.dir is not None and self.evaluation.dir is None:
            raise ValueError("evaluation.dir is required with tasks.dir: held-out tasks cannot be generated for it")
        if self.evaluation.dir is not None and self.tasks.dir is None:
            raise ValueError("evaluation.dir needs tasks.dir: the bundled suite brings its own held-out tasks")
        if self.environment.url is not None and self.verify != VerifyConfig():
            raise ValueError("verify.*: with environment.url verdicts are the server's: give it these settings there")
        both = set(self.tasks.families) & set(self.evaluation.untrained_families)
        if both:
            raise ValueError(
                f"evaluation.untrained_families: {', '.join(sorted(both))} would be trained on (tasks.families)"
            )
        if self.rollout.schedule == "lockstep" and self.rollout.concurrency < self.rollout.samples:
            raise ValueError("rollout.concurrency must be at least rollout.samples")
        return self
