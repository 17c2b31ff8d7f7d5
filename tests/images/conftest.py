"""A real Docker daemon, and nothing of a test left in it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from termrl.sandboxes.base import ImageBuild, SandboxSpec
from termrl.sandboxes.docker.builds import REPOSITORY
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.images import ImageStore
from tests.docker import IMAGE
from tests.images.registry import TinyRegistry, serving
from tests.states import own_state

BASE = IMAGE


@pytest.fixture(scope="session")
def client(docker_image: str) -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture(scope="session")
def state() -> Iterator[Path]:
    """A state folder that other users may walk into."""
    with own_state() as folder:
        yield folder


@pytest.fixture
def marker(client: docker.DockerClient) -> Iterator[str]:
    """A word that a test's Dockerfiles hold, so that their images are of this test alone; they are removed."""
    word = uuid.uuid4().hex
    yield word
    remove_images(client, f"termrl.marker={word}")


def remove_images(client: docker.DockerClient, label: str) -> None:
    """Remove the built images with ``label``."""
    for image in client.images.list(name=REPOSITORY, filters={"label": label}):
        for tag in image.tags:
            client.images.remove(tag, force=True)


@pytest.fixture
def store(client: docker.DockerClient, tmp_path: Path) -> Iterator[Callable[..., ImageStore]]:
    """Makes stores with a state folder of their own."""
    made: list[ImageStore] = []

    def make(**settings: Any) -> ImageStore:
        settings.setdefault("pull_backoff_s", 0.05)
        labels = {"termrl.test": str(os.getpid())}
        made.append(ImageStore(client, ImageSettings(**settings), state=tmp_path / "state", labels=labels))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not client.containers.list(all=True, filters={"label": f"termrl.test={os.getpid()}"})
    assert not list((tmp_path / "state" / "images" / "scratch").glob("*"))
    assert not list((tmp_path / "state" / "images" / "locks").glob("*"))


@pytest.fixture
def registry(client: docker.DockerClient) -> Iterator[TinyRegistry]:
    """A registry on loopback; the images that were pulled from it are removed."""
    with serving() as registry:
        yield registry
        for image in client.images.list():
            names = [*image.tags, *image.attrs.get("RepoDigests", [])]
            if any(name.startswith(f"127.0.0.1:{registry.port}/") for name in names):
                client.images.remove(image.id, force=True)


@pytest.fixture
def context(tmp_path: Path, marker: str) -> Callable[..., SandboxSpec]:
    """Writes a build context of this test and gives a spec that builds it."""

    def write(dockerfile: str, *, name: str = "made", timeout_s: float = 60.0, **files: str) -> SandboxSpec:
        folder = tmp_path / name / "environment"
        folder.mkdir(parents=True, exist_ok=True)
        label = f'LABEL termrl.marker="{marker}"\n'
        (folder / "Dockerfile").write_text(dockerfile.rstrip() + "\n" + label)
        for file, text in files.items():
            (folder / file).write_text(text)
        return SandboxSpec(name, build=ImageBuild(folder, timeout_s))

    return write
