"""Images, as far as they are already in the daemon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from termrl.errors import ImageError
from termrl.sandboxes.base import SandboxSpec

if TYPE_CHECKING:
    import docker


@dataclass(frozen=True)
class ResolvedImage:
    """An image that is in the daemon, and what it says of the containers made from it."""

    id: str
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    architecture: str = ""


class ImageStore:
    """Finds images in the daemon."""

    def __init__(self, client: docker.DockerClient, settings: Any = None, **_: Any) -> None:
        self._client = client

    def close(self) -> None:
        """Nothing runs."""

    def ensure(self, spec: SandboxSpec) -> ResolvedImage:
        """The image of a spec.

        Raises:
            ImageError: the daemon does not have it.
        """
        import docker.errors

        try:
            facts = self._client.api.inspect_image(spec.image)
        except docker.errors.APIError as error:
            raise ImageError(f"{spec.task_id}: image {spec.image}: {error.explanation}") from error
        config = facts.get("Config") or {}
        env = dict(entry.split("=", 1) for entry in config.get("Env") or [] if "=" in entry)
        return ResolvedImage(
            facts["Id"], config.get("WorkingDir") or None, env, config.get("User") or None, facts["Architecture"]
        )
