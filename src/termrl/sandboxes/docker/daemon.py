"""What images ask of the daemon: which images it has, and what kind of daemon it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import docker
import docker.errors
from docker.transport import UnixHTTPAdapter

from termrl.errors import ImageError
from termrl.sandboxes.docker.connection import is_podman

_SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")


class Daemon:
    """One daemon, asked through the SDK's client."""

    def __init__(self, client: docker.DockerClient) -> None:
        self.client = client

    @cached_property
    def about(self) -> Mapping[str, Any]:
        """What it says of its version."""
        return self.client.version()

    @property
    def architecture(self) -> str:
        """What it runs by itself, in Go's words, such as ``amd64``."""
        return str(self.about.get("Arch", ""))

    @property
    def name(self) -> str:
        """For messages."""
        return f"the daemon ({self.about.get('Version', 'of unknown version')})"

    @property
    def podman(self) -> bool:
        """Whether it is podman, which does not build with BuildKit."""
        return is_podman(self.about)

    @property
    def address(self) -> str:
        """Where it listens, in the form of ``DOCKER_HOST``."""
        api = self.client.api
        adapter = api.get_adapter(api.base_url)
        if isinstance(adapter, UnixHTTPAdapter):
            return f"unix://{adapter.socket_path}"
        return re.sub(r"^https?://", "tcp://", api.base_url)

    def find(self, name: str) -> Mapping[str, Any] | None:
        """What it says of an image, or ``None`` if it does not have it.

        Raises:
            ImageError: that is no image's name.
        """
        try:
            return self.client.api.inspect_image(name)
        except docker.errors.ImageNotFound:
            return None
        except docker.errors.APIError as error:
            if error.is_client_error() or "invalid reference" in str(error.explanation):
                raise ImageError(f"image {name}: {error.explanation}") from None
            raise

    def has_bash(self, image: str, labels: Mapping[str, str]) -> bool:
        """Whether an image has bash; looks into a container with ``labels`` that is never started."""
        api = self.client.api
        made = api.create_container(image, command=["true"], labels=dict(labels), network_disabled=True)
        try:
            where = f"{api.base_url}/v{api.api_version}/containers/{made['Id']}/archive"
            return any(api.head(where, params={"path": shell}).status_code == 200 for shell in _SHELLS)
        finally:
            api.remove_container(made["Id"], v=True, force=True)
