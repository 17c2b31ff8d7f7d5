"""Going on with an evaluation: with the settings it began with, but for those that no result depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from termrl.evaluation.config import EvalConfig
from termrl.runs.resume import refuse_changes
from termrl.settings import load_settings

FREE = (
    *("run_dir", "concurrency", "retries", "retry_wait_s", "stop_after", "track."),
    *("policy.timeout_s", "policy.wait_s", "policy.api_key_env", "policy.api_key_file", "policy.threads"),
    *("episode.reset_s", "episode.grace_s", "environment.url", "environment.token_file"),
    *("environment.capacity_wait_s", "environment.connect_timeout_s", "environment.reset_s", "environment.grace_s"),
    *("environment.ping_interval_s", "environment.ping_timeout_s"),
)
"""Settings that may differ in a resumed evaluation: by name, or, ending in a dot, by section."""


def resumed_config(
    run: Path, *, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None, flags: Sequence[str] = ()
) -> EvalConfig:
    """The settings that the evaluation in ``run`` goes on with: the saved ones, and over them what is given.

    Raises:
        ConfigError: bad settings, or ones that would change what is measured; each with the old and the new value.
    """
    source = run / "config.toml"
    saved = load_settings(EvalConfig, files=[source]).config
    config = load_settings(EvalConfig, files=[source, *files], environ=environ, flags=flags).config
    refuse_changes(run, saved, config, free=FREE)
    return config
