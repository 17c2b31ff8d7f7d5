"""How images are had: the ``[images]`` table of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from termrl.errors import ConfigError

Builder = Literal["auto", "buildkit", "classic"]


class ImageSettings(BaseModel):
    """What is pulled and built, and how long that may take. Times are seconds.

    A key that is an image's name (it holds ``:`` or ``/``) is an alias: ``"debian:12" = "local/debian:12"`` stands for
    the same line in ``[images.aliases]``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    aliases: dict[str, str] = Field(
        default={}, description="images to use in place of others, in docker_image and in Dockerfiles"
    )
    ca_file: Path | None = Field(
        default=None, description="PEM file of a certificate authority that curl, apt, pip and git trust within builds"
    )
    platform: str | None = Field(
        default=None, min_length=1, description="such as linux/amd64; none: the daemon's own platform"
    )
    pull_attempts: int = Field(default=4, ge=1, le=20, description="how often a pull is tried")
    pull_backoff_s: float = Field(default=2.0, ge=0, description="wait before the second try, doubled for each further")
    pull_stall_s: float = Field(default=300.0, gt=0, description="a pull without any progress for so long has failed")
    pull_timeout_s: float = Field(default=3600.0, gt=0, description="bound on all tries of one pull")
    build_timeout_s: float = Field(default=3600.0, gt=0, description="bound on a build, whatever the task allows")
    build_network: Literal["default", "none"] = Field(default="default", description="network of RUN steps")
    builder: Builder = Field(
        default="auto",
        description="buildkit: by the docker command line; classic: the Engine API's own; auto: BuildKit if it can be",
    )
    parallel: int = Field(default=4, ge=1, description="pulls and builds at once")
    retry_after_s: float = Field(
        default=60.0, ge=0, description="an image that could not be had is not asked for again for so long"
    )

    @classmethod
    def of(cls, given: ImageSettings | Mapping[str, Any] | None) -> ImageSettings:
        """Settings from a table.

        Raises:
            ConfigError: with every bad key.
        """
        if isinstance(given, ImageSettings):
            return given
        try:
            return cls.model_validate(given or {})
        except ValidationError as error:
            found = error.errors(include_url=False)
            raise ConfigError([f"images.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found]) from None

    @model_validator(mode="before")
    @classmethod
    def _names_are_aliases(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = {key: value for key, value in data.items() if isinstance(key, str) and (":" in key or "/" in key)}
        if not names:
            return data
        rest = {key: value for key, value in data.items() if key not in names}
        given = rest.get("aliases", {})
        return {**rest, "aliases": {**given, **names}} if isinstance(given, dict) else data
