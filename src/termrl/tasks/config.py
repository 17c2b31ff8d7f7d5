"""The schema of ``task.toml`` as Harbor 0.26 has it, legacy keys included, and what of it cannot be run yet.

Everything is parsed; a bad value is an error, an unknown key a warning, and a feature that termrl does not run
yet is refused by its key (:func:`unsupported`), never ignored.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from termrl.errors import TaskError
from termrl.sandboxes.base import NetworkMode

SCHEMA_VERSION = "1.4"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])", re.IGNORECASE)
_MIB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def _size_mib(value: Any) -> Any:
    """A legacy size such as ``"2G"`` in MiB; only the suffixes G, M and K exist."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a size: write a number and one of G, M, K, such as '2G'")
    mib = int(float(match[1]) * _MIB[match[2].upper()])
    if mib < 1:
        raise ValueError(f"{value!r} is less than 1 MiB")
    return mib


def _environment(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"{name!r} is not a variable's name")
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a NUL byte")
    return values


def _absolute(value: str | None) -> str | None:
    if value is not None and not value.startswith("/"):
        raise ValueError(f"{value!r} is not an absolute path")
    return value


def _artifact(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


Seconds = Annotated[float, Field(gt=0)]
Environ = Annotated[dict[str, str], AfterValidator(_environment)]
LegacySize = Annotated[int | None, BeforeValidator(_size_mib)]


class _Section(BaseModel):
    """A table of task.toml. Unknown keys are kept, so that they can be named in a warning."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Author(_Section):
    """One author of a task."""

    name: str
    email: str | None = None


class PackageConfig(_Section):
    """``[task]``: the task's identity as ``org/name``."""

    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _PACKAGE_NAME.fullmatch(value) or ".." in value:
            raise ValueError(f"{value!r} is not of the form org/name (letters, digits, '.', '_', '-')")
        return value

    @property
    def short_name(self) -> str:
        """The name without its org."""
        return self.name.split("/", 1)[1]


class _Networked(_Section):
    """Keys that say what may be reached. ``None`` leaves it to the enclosing table."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None

    @model_validator(mode="after")
    def _hosts_need_an_allowlist(self) -> _Networked:
        if self.allowed_hosts and self.network_mode not in (None, "allowlist"):
            raise ValueError(f"allowed_hosts needs network_mode 'allowlist', not {self.network_mode!r}")
        if self.network_mode == "allowlist" and not self.allowed_hosts:
            raise ValueError("network_mode 'allowlist' needs allowed_hosts")
        return self

    @property
    def own_network_mode(self) -> NetworkMode | None:
        """What this table itself asks for; hosts alone mean an allowlist."""
        return self.network_mode or ("allowlist" if self.allowed_hosts else None)


class HealthcheckConfig(_Section):
    """A command that must succeed before the agent starts."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=0)


class McpServerConfig(_Section):
    """One MCP server that the agent may call."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    @model_validator(mode="after")
    def _reachable(self) -> McpServerConfig:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport {self.transport!r} needs {needed}")
        return self


class TpuConfig(_Section):
    """A TPU slice."""

    type: str
    topology: str


class EnvironmentConfig(_Networked):
    """``[environment]``: what the sandbox is made from. Sizes in MiB."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: list[str] | None = None
    tpu: TpuConfig | None = None
    env: Environ = {}
    workdir: Annotated[str | None, AfterValidator(_absolute)] = None
    skills_dir: str | None = None
    mcp_servers: list[McpServerConfig] = []
    healthcheck: HealthcheckConfig | None = None

    allow_internet: bool | None = None
    memory: LegacySize = None
    storage: LegacySize = None

    @model_validator(mode="after")
    def _legacy_sizes(self) -> EnvironmentConfig:
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            legacy, current = getattr(self, old), getattr(self, new)
            if legacy is None:
                continue
            if current is not None and current != legacy:
                raise ValueError(f"{old} ({legacy} MiB) and {new} ({current}) disagree: keep {new}")
            setattr(self, new, legacy)
        return self

    @property
    def effective_network_mode(self) -> NetworkMode:
        """``network_mode``, else what the legacy ``allow_internet`` says, else public."""
        if self.own_network_mode is not None:
            return self.own_network_mode
        return "no-network" if self.allow_internet is False else "public"


class _Phase(_Networked):
    """A phase of a trial, whose network is the environment's unless it says otherwise."""

    def differs_from(self, environment: EnvironmentConfig) -> bool:
        """Whether this phase wants to reach something else than the environment gives."""
        mode = self.own_network_mode
        if mode is None or mode != environment.effective_network_mode:
            return mode is not None
        return mode == "allowlist" and set(self.allowed_hosts or ()) != set(environment.allowed_hosts or ())


class AgentConfig(_Phase):
    """``[agent]``; ``timeout_sec = None`` is no limit."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None


class CollectConfig(_Section):
    """A command run in a service between the agent and the tests."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class VerifierConfig(_Phase):
    """``[verifier]``: how the tests are run."""

    timeout_sec: Seconds = 600.0
    env: Environ = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentConfig | None = None
    collect: list[CollectConfig] = []


class SolutionConfig(_Section):
    """``[solution]``: variables of the oracle."""

    env: Environ = {}


class ArtifactConfig(_Section):
    """A file or folder that Harbor keeps after the trial."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


Artifacts = list[Annotated[ArtifactConfig, BeforeValidator(_artifact)]]


class StepConfig(_Section):
    """One step of a multi-step task."""

    name: str
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckConfig | None = None
    artifacts: Artifacts = []


class TaskConfig(_Section):
    """The whole of ``task.toml``."""

    schema_version: str = SCHEMA_VERSION
    task: PackageConfig | None = None
    metadata: dict[str, Any] = {}
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    solution: SolutionConfig = SolutionConfig()
    artifacts: Artifacts = []
    steps: list[StepConfig] | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    source: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _legacy_version(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = {**data}
            data.setdefault("schema_version", data.pop("version"))
            data.pop("version", None)
        return data

    @field_validator("metadata")
    @classmethod
    def _own_metadata(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("termrl_userland", "host") != "host":
            raise ValueError(f"termrl_userland is {value['termrl_userland']!r}: only 'host' exists")
        if not isinstance(value.get("termrl_keep_services", False), bool):
            raise ValueError("termrl_keep_services must be true or false")
        return value


OWN_METADATA = frozenset({"termrl_userland", "termrl_keep_services"})


def parse_config(text: str, where: str) -> tuple[TaskConfig, list[str]]:
    """Parse the text of a task.toml.

    Args:
        text: the file's content.
        where: the file's path, for messages.

    Returns:
        The config and warnings, one a line, such as unknown keys.

    Raises:
        TaskError: invalid TOML, or bad fields, all of them at once as ``file: key: message``.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{where}: not valid TOML: {error}") from None
    try:
        config = TaskConfig.model_validate(data)
    except ValidationError as error:
        raise TaskError("\n".join(_problem(where, item) for item in error.errors(include_url=False))) from None
    warnings = [f"{where}: {line}" for line in _unknown_keys(config)]
    for key in config.metadata:
        if key.startswith("termrl_") and key not in OWN_METADATA:
            warnings.append(f"{where}: unknown key metadata.{key}{_suggestion(key, OWN_METADATA)}")
    if config.schema_version.split(".")[0] != "1":
        warnings.append(f"{where}: schema_version {config.schema_version!r} is newer than {SCHEMA_VERSION}")
    return config, warnings


def unsupported(config: TaskConfig) -> list[str]:
    """What this task asks for that termrl cannot do yet, each as ``key: what``; empty if it can be run."""
    environment, verifier = config.environment, config.verifier
    found = {
        "steps": ("multi-step tasks", config.steps is not None),
        "environment.os": (environment.os, environment.os != "linux"),
        "environment.gpus": ("GPUs", bool(environment.gpus)),
        "environment.gpu_types": ("GPUs", bool(environment.gpu_types)),
        "environment.tpu": ("TPUs", environment.tpu is not None),
        "environment.mcp_servers": ("MCP servers", bool(environment.mcp_servers)),
        "environment.skills_dir": ("skills", environment.skills_dir is not None),
        "verifier.environment_mode": ("a separate verifier", verifier.environment_mode == "separate"),
        "verifier.environment": ("a separate verifier", verifier.environment is not None),
        "verifier.collect": ("collect hooks", bool(verifier.collect)),
        "agent.network_mode": ("a network of its own", config.agent.differs_from(environment)),
        "verifier.network_mode": ("a network of its own", verifier.differs_from(environment)),
    }
    return [f"{key}: {what}: not supported yet" for key, (what, present) in found.items() if present]


def _problem(where: str, item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {key}: {message}" if key else f"{where}: {message}"


def _unknown_keys(section: BaseModel, prefix: str = "") -> list[str]:
    lines = [
        f"unknown key {prefix}{key}{_suggestion(key, type(section).model_fields)}"
        for key in (section.model_extra or {})
    ]
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            lines += _unknown_keys(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    lines += _unknown_keys(item, f"{prefix}{name}.{index}.")
    return lines


def _suggestion(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
