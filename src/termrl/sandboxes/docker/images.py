"""Images for sandboxes: pulled or built once, however many sandboxes ask for them at the same time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import docker
import docker.errors
import requests.exceptions

from termrl.errors import ImageError, RateLimitError, SandboxStartError, TaskError
from termrl.sandboxes.base import SandboxSpec
from termrl.sandboxes.docker.builds import Builds
from termrl.sandboxes.docker.daemon import Daemon
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.pull import CLOSING, pull
from termrl.sandboxes.docker.references import Aliases, registry_of
from termrl.sandboxes.host import state_folder

_POLL_S = 0.2


@dataclass(frozen=True)
class ResolvedImage:
    """An image that the daemon has.

    Attributes:
        id: the daemon's own ``sha256:`` id.
        name: what it was asked for by: a reference, or the tag of a build.
        workdir: its WORKDIR, ``None`` if it has none.
        env: its ENV.
        user: its USER, ``None`` for root.
        architecture: in Go's words, such as ``amd64``.
    """

    id: str
    name: str
    workdir: str | None
    env: Mapping[str, str]
    user: str | None
    architecture: str


@dataclass
class _Entry:
    """What is known of one image; its lock is held by whoever finds out."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    image: ResolvedImage | None = None
    failure: ImageError | None = None
    failed_at: float = 0.0


class ImageStore:
    """Has the images of sandboxes; safe for many threads, and for many processes on one daemon.

    Args:
        client: the daemon.
        settings: the ``[images]`` table.
        state: the state folder, for locks and build logs; none: :func:`termrl.sandboxes.host.state_folder`'s.
        labels: put on the short-lived container with which an image is looked into, so that a sweep knows it.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        settings: ImageSettings | None = None,
        *,
        state: Path | None = None,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._settings = settings or ImageSettings()
        self._daemon = Daemon(client)
        self._aliases = Aliases(self._settings.aliases)
        self._labels = dict(labels)
        self._closing = threading.Event()
        folder = (state or state_folder()) / "images"
        self._builds = Builds(self._daemon, self._settings, folder=folder, closing=self._closing)
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._limited: dict[str, tuple[float, RateLimitError]] = {}
        self._guard = threading.Lock()
        self._slots = threading.BoundedSemaphore(self._settings.parallel)

    def known(self, spec: SandboxSpec) -> ResolvedImage | None:
        """The image of ``spec`` if :meth:`ensure` has had it before. Does not block."""
        entry = self._entries.get(_key(spec))
        return entry.image if entry is not None else None

    def ensure(self, spec: SandboxSpec) -> ResolvedImage:
        """The image of ``spec``: there already, pulled, or built. Blocks; call it in a thread.

        An image that could not be had is not asked for again for a while (``retry_after_s``): the same error then
        comes at once.

        Raises:
            RateLimitError: the registry answers that it gets too many requests.
            ImageError: it cannot be pulled or built, has no bash, or is of another architecture.
            SandboxStartError: the daemon does not answer.
            TaskError: the spec names neither an image nor a build.
        """
        key = _key(spec)
        with self._guard:
            entry = self._entries.setdefault(key, _Entry())
        if entry.image is not None:
            return entry.image
        with entry.lock:
            if entry.image is not None:
                return entry.image
            if entry.failure is not None and time.monotonic() - entry.failed_at < self._settings.retry_after_s:
                raise _for_task(spec, entry.failure)
            try:
                entry.image = self._have(spec)
            except ImageError as error:
                entry.failure, entry.failed_at = error, time.monotonic()
                raise _for_task(spec, error) from error
            except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
                said = error.explanation if isinstance(error, docker.errors.APIError) else error
                raise SandboxStartError(
                    f"{spec.task_id}: the Docker daemon failed: {said}", hint="termrl doctor --sandbox docker"
                ) from error
            return entry.image

    def forget(self, spec: SandboxSpec) -> None:
        """Look for the image of ``spec`` anew at the next :meth:`ensure` (the daemon has lost it)."""
        with self._guard:
            self._entries.pop(_key(spec), None)

    def close(self) -> None:
        """Stop pulls and builds that still run; whoever waits for them gets an error. Idempotent."""
        self._closing.set()

    # -- parts of ensure -----------------------------------------------------------------------------------------

    def _have(self, spec: SandboxSpec) -> ResolvedImage:
        if spec.image is not None:
            name = self._aliases.of(spec.image)
            attrs = self._daemon.find(name) or self._pulled(name)
        else:
            assert spec.build is not None
            with self._slot():
                name, attrs = self._builds.ensure(spec.build)
        return self._checked(name, attrs)

    def _pulled(self, name: str) -> Mapping[str, Any]:
        registry = registry_of(name)
        since, limit = self._limited.get(registry, (0.0, None))
        if limit is not None and (ago := time.monotonic() - since) < self._settings.retry_after_s:
            why = f"{registry} reached its rate limit {ago:.0f} s ago"
            raise RateLimitError(f"image {name} was not pulled: {why}", hint=limit.hint)
        with self._slot():
            try:
                pull(self._daemon.client, name, self._settings, wait=self._closing.wait)
            except RateLimitError as error:
                self._limited[registry] = (time.monotonic(), error)
                raise
        attrs = self._daemon.find(name)
        if attrs is None:
            raise ImageError(f"image {name} was pulled, but {self._daemon.name} does not have it")
        return attrs

    def _workdir(self, config: Mapping[str, Any]) -> str | None:
        named = config.get("WorkingDir")
        # podman says / of an image that names none
        return None if not named or (named == "/" and self._daemon.podman) else named

    def _checked(self, name: str, attrs: Mapping[str, Any]) -> ResolvedImage:
        config = attrs.get("Config") or {}
        pairs = (entry.partition("=") for entry in config.get("Env") or [])
        image = ResolvedImage(
            id=str(attrs["Id"]),
            name=name,
            workdir=self._workdir(config),
            env=MappingProxyType({key: value for key, _, value in pairs}),
            user=config.get("User") or None,
            architecture=str(attrs.get("Architecture", "")),
        )
        system = attrs.get("Os") or "linux"
        if system != "linux":
            raise ImageError(f"image {name} is for {system}: only Linux images can be run")
        wanted = self._architecture()
        if image.architecture and wanted and image.architecture != wanted:
            raise ImageError(
                f"image {name} is for {image.architecture}, and this is {wanted}",
                hint=f'if this machine emulates it: [images] platform = "linux/{image.architecture}"',
            )
        if not self._daemon.has_bash(image.id, self._labels):
            raise ImageError(f"image {name} has no bash", hint="commands and tests are run by bash: install it there")
        return image

    def _architecture(self) -> str:
        if self._settings.platform is None:
            return self._daemon.architecture
        parts = self._settings.platform.split("/")
        return parts[1] if len(parts) > 1 else parts[0]

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """One of the few pulls and builds at once."""
        while not self._slots.acquire(timeout=_POLL_S):
            self._stop_if_closing()
        try:
            self._stop_if_closing()
            yield
        finally:
            self._slots.release()

    def _stop_if_closing(self) -> None:
        if self._closing.is_set():
            raise ImageError(f"the image was not made ready: {CLOSING}")


def _key(spec: SandboxSpec) -> tuple[str, str]:
    if spec.image is not None:
        return "image", spec.image
    if spec.build is not None:
        return "build", str(spec.build.context)
    raise TaskError(f"{spec.task_id}: names neither an image nor a Dockerfile: docker has nothing to run it on")


def _for_task(spec: SandboxSpec, error: ImageError) -> ImageError:
    """The same error, told of one task; every thread raises one of its own."""
    return type(error)(f"{spec.task_id}: {error.message}", hint=error.hint)
