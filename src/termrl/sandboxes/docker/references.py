"""Names of images: which two mean the same, and what a configured alias makes of one."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_REGISTRY = "docker.io"


def normalised(reference: str) -> str:
    """The full form of an image's name, such as ``docker.io/library/debian:12`` for ``debian:12``.

    A tag that is not given is ``latest``, unless there is a digest.
    """
    name, at, digest = reference.partition("@")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, path = ("docker.io" if first == "index.docker.io" else first), rest
    else:
        registry, path = DEFAULT_REGISTRY, name
    if registry == DEFAULT_REGISTRY and "/" not in path:
        path = f"library/{path}"
    if ":" not in path.rsplit("/", 1)[-1] and not digest:
        path += ":latest"
    return f"{registry}/{path}{at}{digest}"


def registry_of(reference: str) -> str:
    """The registry that holds an image, such as ``docker.io``."""
    return normalised(reference).partition("/")[0]


def split(reference: str) -> tuple[str, str]:
    """(repository, tag or digest) as the Engine API's pull takes them; without either, the tag ``latest``."""
    name, _, digest = reference.partition("@")
    head, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{head}{slash}{last}", digest or tag or "latest"


class Aliases:
    """What is used in place of public images; names that mean the same image are the same name."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = {normalised(name): target for name, target in aliases.items()}

    def of(self, reference: str) -> str:
        """The image to use where ``reference`` is asked for; ``reference`` itself if there is no alias."""
        return self._aliases.get(normalised(reference), reference)
