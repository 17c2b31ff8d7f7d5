"""The settings of an evaluation: :class:`EvalConfig`, in the same layers as a training run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from termrl.agent.policy import check_url, redacted
from termrl.config import EnvironmentConfig, EpisodeConfig, SandboxConfig, Section, TrackConfig, VerifyConfig
from termrl.errors import ConfigError
from termrl.rollout.bounded import Bounds
from termrl.sandboxes.docker.image_settings import ImageSettings

ENGINE_S = 900.0

ENDPOINT_PRESETS: dict[str, Any] = {
    "episode": {
        "opening": "terminal-bench",
        "max_turns": 50,
        "max_tokens": 4096,
        "command_timeout_s": 120.0,
        "output_chars": 8000,
        "max_format_errors": 3,
    }
}
"""What stands for other defaults where the policy is an endpoint's: models there follow instructions."""


class PolicyConfig(Section):
    """What is measured: an endpoint's model, or one that runs in this process. Times are seconds."""

    base_url: str | None = Field(
        default=None, description="OpenAI-compatible endpoint, usually ending in /v1; none: model runs in this process"
    )
    model: str | None = Field(
        default=None,
        description="the endpoint's name for it; without an endpoint the bundled model, a folder, a hub id, or a "
        "run's folder: RUN (its newest checkpoint), RUN@best, RUN@STEP",
    )
    api_key_env: str | None = Field(
        default=None,
        description="variable that holds the key for base_url; none: OPENAI_API_KEY, for OpenAI's own host",
    )
    api_key_file: Path | None = Field(default=None, description="file that holds the key for base_url")
    timeout_s: float = Field(default=1200.0, gt=0, description="silence on one call after which it has failed")
    wait_s: float = Field(
        default=600.0, ge=0, description="how long one turn is put off by an endpoint that is full or not there"
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="what the endpoint calls the limit of new tokens"
    )
    extra_body: dict[str, Any] = Field(default={}, description="further fields of every request; recorded, no secrets")
    send_seed: bool = Field(default=True, description="false for endpoints that refuse a seed")
    echo_reasoning: bool = Field(
        default=True, description="send reasoning back as it came; false for endpoints that refuse to get it"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of a model in this process; none: all")

    @field_validator("base_url")
    @classmethod
    def _url(cls, url: str | None) -> str | None:
        if url is not None:
            try:
                check_url(url)
            except ConfigError as error:
                raise ValueError(error.message) from None
            if urlsplit(url).query or urlsplit(url).fragment:
                raise ValueError(f"{redacted(url)} has a query or a fragment, which would end up in records")
        return url

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.base_url is not None and self.model is None:
            raise ValueError("policy.model is needed with policy.base_url: the endpoint's name for it (-m)")
        if self.base_url is None and (self.api_key_env or self.api_key_file):
            raise ValueError("policy.api_key_*: a key needs the policy.base_url that it is for")
        if self.api_key_env and self.api_key_file:
            raise ValueError("policy.api_key_env and policy.api_key_file: give one")
        return self


class SampleConfig(Section):
    """How the policy samples."""

    temperature: float | None = Field(
        default=None, ge=0, description="none: the endpoint's own; in this process that of the run, else 0.8"
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="endpoints only; none: the endpoint's own")


class EvalTasksConfig(Section):
    """What is attempted: a folder of Harbor tasks, or the bundled suite."""

    dir: Path | None = Field(default=None, description="folder of Harbor tasks; none: the bundled suite first-steps")
    include: tuple[str, ...] = Field(default=(), description="only tasks whose name matches one of these globs")
    exclude: tuple[str, ...] = Field(default=(), description="no tasks whose name matches one of these globs")
    levels: tuple[int, ...] = Field(
        default=(), description="only of these levels; empty: all of a folder, level 1 of the bundled suite"
    )
    families: tuple[str, ...] = Field(default=(), description="only of these families")
    per_family: int = Field(default=8, ge=1, description="tasks to generate per family (bundled suite only)")
    split: Literal["train", "eval"] = Field(default="eval", description="whose words are used (bundled suite only)")
    seed: int = Field(default=0, ge=0, description="which tasks are generated (bundled suite only)")
    skip_broken: bool = Field(default=False, description="leave broken task folders out instead of refusing the set")


class EvalConfig(Section):
    """Everything that ``termrl eval`` takes."""

    run_dir: Path | None = Field(default=None, description="the new folder for the results; also -o")
    samples: int = Field(default=1, ge=1, description="attempts at each task; also -k")
    concurrency: int = Field(
        default=16, ge=1, description="attempts at once, and calls to the endpoint at most; also -n"
    )
    seed: int = Field(default=0, ge=0)
    retries: int = Field(
        default=2, ge=0, le=20, description="times an attempt without a verdict is made again, from its start"
    )
    retry_wait_s: float = Field(default=5.0, ge=0, description="seconds before that")
    stop_after: int | None = Field(
        default=None,
        ge=1,
        description="so many attempts in a row without a verdict, of one cause, end the evaluation; none: twice the "
        "concurrency, at least 20",
    )
    policy: PolicyConfig = PolicyConfig()
    tasks: EvalTasksConfig = EvalTasksConfig()
    sampling: SampleConfig = SampleConfig()
    sandbox: SandboxConfig = SandboxConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    images: ImageSettings = ImageSettings()
    episode: EpisodeConfig = EpisodeConfig()
    verify: VerifyConfig = VerifyConfig()
    track: TrackConfig = TrackConfig()

    def sandbox_settings(self) -> dict[str, Any]:
        """What :func:`termrl.sandboxes.open_provider` is given for ``sandbox.backend``."""
        return self.sandbox.provider_settings(self.images)

    def bounds(self) -> Bounds:
        """How long environments and policy are waited for."""
        policy = self.policy
        silent_s = ENGINE_S if policy.base_url is None else policy.timeout_s + policy.wait_s + 60.0
        return Bounds(self.episode.reset_s, self.episode.grace_s, silent_s)

    @property
    def streak(self) -> int:
        """How many attempts in a row, lost to one cause, end the evaluation."""
        return self.stop_after or max(20, 2 * self.concurrency)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.environment.serve:
            raise ValueError("environment.serve: an evaluation starts no server; give environment.url, or a sandbox")
        if self.environment.url is not None and self.verify != VerifyConfig():
            raise ValueError("verify.*: with environment.url verdicts are the server's: give it these settings there")
        if self.policy.base_url is None and self.sampling.top_p not in (None, 1.0):
            raise ValueError("sampling.top_p: for endpoints only")
        return self
