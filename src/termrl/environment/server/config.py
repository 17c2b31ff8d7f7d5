"""The settings of ``termrl serve``, and the variables of Terminal-Bench 2's own server that fill the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from termrl.config import SandboxConfig, Section, VerifyConfig
from termrl.environment.terminal import COMMAND_TIMEOUT_S
from termrl.errors import ConfigError
from termrl.sandboxes.docker.image_settings import ImageSettings

DEFAULT_PORT = 8003
MEMORY_SHARE = 0.8

_GONE = "has no meaning here and is ignored"
_MEANINGLESS = {
    "TB2_REPO_URL": f"{_GONE}: tasks are folders on this machine (TB2_TASKS_DIR)",
    "TB2_CACHE_DIR": f"{_GONE}: nothing is downloaded",
    "TB2_OUTPUT_DIR": f"{_GONE}: a session leaves no files",
    "TB2_TASK_WORKDIR": f"{_GONE}: commands start in the image's WORKDIR, or in [environment] workdir of task.toml",
}
_NO = ("0", "false", "no", "off")


class ServeConfig(Section):
    """Everything that ``termrl serve`` takes. Times are seconds."""

    tasks: tuple[Path, ...] = Field(default=(), description="folders of Harbor tasks, or task folders")
    skip_broken: bool = Field(
        default=False, description="leave out tasks that are broken or that the sandbox cannot run, and go on"
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="port to listen on; 0: a free one")
    token_file: Path | None = Field(
        default=None, description="file with the bearer token that clients must send; none: $TERMRL_TOKEN, if set"
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(), description="web pages that may connect from a browser, as scheme://host:port"
    )
    max_sessions: int = Field(default=64, ge=1, description="sessions, hence sandboxes, at once")
    max_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="bound on the sum of memory_mb of the tasks in session; none: 80 % of the machine's memory",
    )
    default_task_id: str | None = Field(
        default=None, description="task of a reset that names none; none: the first of the set"
    )
    command_timeout_s: float = Field(default=COMMAND_TIMEOUT_S, gt=0, description="for a command without wait_seconds")
    max_wait_s: float = Field(default=7200.0, gt=0, description="the largest wait_seconds that is taken")
    reset_s: float = Field(default=600.0, gt=0, description="a reset that takes longer is given up")
    grace_s: float = Field(default=60.0, gt=0, description="what any operation may take beyond its own budget")
    close_s: float = Field(default=30.0, gt=0, description="how long the end of a session is waited for")
    idle_s: float = Field(
        default=1800.0, gt=0, description="a session in which nothing was asked for so long ends; none runs for ever"
    )
    ping_interval_s: float | None = Field(
        default=30.0, gt=0, description="between WebSocket pings; none: no pings (for tunnels that drop them)"
    )
    ping_timeout_s: float | None = Field(
        default=300.0, gt=0, description="a client that leaves a ping unanswered for so long is gone; none: for ever"
    )
    max_frame_mb: int = Field(default=16, ge=1, description="the largest message that is taken")
    shutdown_s: float = Field(default=60.0, gt=0, description="bound on an orderly end, after which it ends at once")
    sandbox: SandboxConfig = SandboxConfig()
    images: ImageSettings = ImageSettings()
    verify: VerifyConfig = VerifyConfig()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.tasks:
            raise ValueError("tasks: nothing to serve; name a folder of tasks (termrl serve TASKS, or TB2_TASKS_DIR)")
        return self


ALIASES: Mapping[str, tuple[str, ...]] = {
    "TB2_TASKS_DIR": ("tasks",),
    "TB2_COMMAND_TIMEOUT_S": ("command_timeout_s",),
    "TB2_DEFAULT_TASK_ID": ("default_task_id",),
    "MAX_CONCURRENT_ENVS": ("max_sessions",),
}
"""Variables of Terminal-Bench 2's own server, and the settings that they fill."""


def check_tbench2_variables(environ: Mapping[str, str]) -> list[str]:
    """What the other variables of Terminal-Bench 2's own server ask for: one warning for each without a meaning.

    Raises:
        ConfigError: one asks for what this server never does.
    """
    refused = []
    mode = environ.get("TB2_MODE", "").strip().lower()
    if mode == "local":
        refused.append("TB2_MODE: local: commands never run on the bare host (unset it; --sandbox says where they do)")
    if environ.get("TB2_WITHHOLD_TESTS", "").strip().lower() in _NO:
        refused.append("TB2_WITHHOLD_TESTS: off: tests are never in the sandbox while the policy acts (unset it)")
    if refused:
        raise ConfigError(refused)
    warnings = [f"{name} {why}" for name, why in _MEANINGLESS.items() if environ.get(name)]
    if mode:
        warnings.append(f"TB2_MODE={mode} {_GONE}: --sandbox says where commands run")
    return warnings
