"""The settings of an agent function's episode: variables that users of miles know, and a TOML file for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from termrl.agent.types import Limits
from termrl.config import Section, VerifyConfig
from termrl.environment.address import Address
from termrl.environment.remote_config import RemoteSettings
from termrl.errors import ConfigError
from termrl.sandboxes import BACKENDS
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.settings import Key, load_settings

DEFAULT_URL = "http://localhost:8003"
FILE_VARIABLE = "OPENENV_CONFIG"
HOSTED = ("daytona", "e2b", "agentenv", "modal")

VARIABLES: Mapping[str, Key] = {
    "SWE_AGENT_MODEL_NAME": ("model_name",),
    "AGENT_MODEL_NAME": ("model_name",),
    "OPENENV_ENV_URL": ("env_url",),
    "OPENENV_SANDBOX_BACKEND": ("sandbox_backend",),
    "OPENENV_TB2_TASKS_DIR": ("tasks_dir",),
    "OPENENV_MAX_TURNS": ("max_turns",),
    "OPENENV_MESSAGE_TIMEOUT_S": ("message_timeout_s",),
    "OPENENV_MAX_ROLLOUT_TIME_SECONDS": ("wall_s",),
    "OPENENV_TASK_WORKDIR": ("environment", "legacy_workdir"),
    "OPENENV_TB2_TESTS_SRC": ("environment", "legacy_tests_src"),
    "OPENENV_TOKEN_FILE": ("environment", "token_file"),
    "MILES_ROUTER_EXTERNAL_HOST": ("external_host",),
}
"""Variables, and the setting that each fills; a later one wins. They win over the file of :data:`FILE_VARIABLE`."""

_MAY_BE_EMPTY = ("OPENENV_TASK_WORKDIR",)


class AgentSettings(Section):
    """What one episode needs to know beside its sample. Times are seconds."""

    env_url: str | None = Field(default=None, description="OpenEnv server that runs the environments")
    sandbox_backend: str | None = Field(
        default=None, description="in place of a server: a sandbox on this machine for each episode, and which kind"
    )
    sandbox_settings: dict[str, Any] = Field(default={}, description="settings of that kind, passed on as they are")
    tasks_dir: Path | None = Field(default=None, description="folder of Harbor tasks; required with sandbox_backend")
    model_name: str = Field(default="model", min_length=1, description="the model's name in chat requests")
    external_host: str | None = Field(default=None, description="in place of the session server's host")
    max_turns: int = Field(default=30, ge=1)
    max_tokens: int = Field(default=8192, ge=1, description="new tokens in one turn, where miles does not say")
    wall_s: float = Field(default=3600.0, gt=0, description="engine and commands; min with the task's own timeout")
    message_timeout_s: float = Field(
        default=1200.0,
        gt=0,
        description="silence of the policy or of a reset that is a loss; tests get their own budget and more",
    )
    command_timeout_s: float | None = Field(default=None, gt=0, description="one command; none: the environment's")
    verify_timeout_s: float | None = Field(default=None, gt=0, description="the tests; none: the task's own")
    output_chars: int = Field(default=4000, ge=20, description="characters of one command's output that go back")
    max_format_errors: int = Field(default=3, ge=0, description="replies without a command before the episode ends")
    lenient: bool = Field(default=False, description="the reply parser's lenient mode")
    retries: int = Field(default=2, ge=0, description="further tries where no turn was asked for yet")
    retry_wait_s: float = Field(default=2.0, ge=0, description="before the first of them, then twice that, …")
    stop_after_lost_groups: int = Field(
        default=32, ge=0, description="groups lost in a row after which keep_group ends the run; 0: never"
    )
    environment: RemoteSettings = RemoteSettings(capacity_wait_s=1800.0)
    images: ImageSettings = ImageSettings()
    verify: VerifyConfig = VerifyConfig()

    @field_validator("sandbox_backend")
    @classmethod
    def _backend(cls, name: str | None) -> str | None:
        known = ", ".join(BACKENDS)
        if name is not None and name.strip().lower() in HOSTED:
            raise ValueError(f"hosted sandboxes are not supported: {known}, or a server by OPENENV_ENV_URL")
        if name is not None and name not in BACKENDS:
            raise ValueError(f"there are {known}")
        return name

    @field_validator("env_url")
    @classmethod
    def _url(cls, url: str | None) -> str | None:
        try:
            return url if url is None else url if Address.of(url) else None
        except ConfigError as error:
            raise ValueError(error.message) from None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.sandbox_backend is not None and self.env_url is not None:
            raise ValueError(
                "OPENENV_SANDBOX_BACKEND and OPENENV_ENV_URL are both set: unset the one that is not meant"
            )
        if self.sandbox_backend is not None and self.tasks_dir is None:
            raise ValueError("OPENENV_SANDBOX_BACKEND needs OPENENV_TB2_TASKS_DIR, the folder of the tasks")
        return self

    @property
    def url(self) -> str:
        """The server, where there is no sandbox backend."""
        return self.env_url or DEFAULT_URL

    @property
    def remote(self) -> RemoteSettings:
        """How the server is talked to: a reset may take as long as any other message."""
        return self.environment.model_copy(update={"reset_s": max(self.environment.reset_s, self.message_timeout_s)})

    def limits(self, *, max_tokens: int | None, context_window: int | None) -> Limits:
        """The agent's limits; ``None`` leaves the new tokens of a turn to the settings, the window to the endpoint."""
        return Limits(
            max_turns=self.max_turns,
            max_tokens=max_tokens or self.max_tokens,
            context_window=context_window,
            wall_s=self.wall_s,
            command_timeout_s=self.command_timeout_s,
            output_chars=self.output_chars,
            max_format_errors=self.max_format_errors,
            verify_timeout_s=self.verify_timeout_s,
            lenient=self.lenient,
        )


def read_settings(environ: Mapping[str, str]) -> AgentSettings:
    """The settings that ``environ`` gives: the file that ``$OPENENV_CONFIG`` names, then :data:`VARIABLES`.

    Raises:
        ConfigError: with every problem, each with the variable or file that it is in.
    """
    given = tuple((name, environ[name]) for name in VARIABLES if name in environ)
    file = environ.get(FILE_VARIABLE) or None
    return _read(given, file, _modified(file))


def _modified(file: str | None) -> int:
    try:
        return 0 if file is None else Path(file).stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=64)
def _read(given: tuple[tuple[str, str], ...], file: str | None, modified: int) -> AgentSettings:
    empty = [f"--{'.'.join(VARIABLES[name])}=" for name, text in given if not text and name in _MAY_BE_EMPTY]
    files = () if file is None else (Path(file),)
    return load_settings(AgentSettings, files=files, environ=dict(given), aliases=VARIABLES, flags=empty).config
