"""What an image holds, read from a container of it that is never started, and put back into one that was changed."""

from __future__ import annotations

import io
import posixpath
import tarfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from termrl.sandboxes.docker import reaper

if TYPE_CHECKING:
    import docker

_MAX_HELD = 64 << 20
# Go's file mode bit of a symbolic link, as the daemon has it in what it says of a path.
_GO_SYMLINK = 1 << 27


class Pristine:
    """A container for each image asked for, made but never started; the daemon reads files from it.

    What was read is kept, up to a bound: the same few programs are asked for again and again.

    Args:
        labels: by which a sweep knows the containers.
    """

    def __init__(self, client: docker.DockerClient, labels: Mapping[str, str]) -> None:
        self._client = client
        self._labels = dict(labels)
        self._made: dict[str, str] = {}
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], bytes | None] = {}
        self._size = 0

    def read(self, image: str, path: str) -> bytes | None:
        """A tar archive of ``path`` in ``image``; ``None`` if nothing is there. Blocks.

        Raises:
            docker.errors.APIError: the daemon cannot.
        """
        import docker.errors

        key = (image, path)
        if key in self._held:
            return self._held[key]
        try:
            chunks, found = self._client.api.get_archive(self.of(image), path)
            data = _link_kept(b"".join(chunks), found)
        except docker.errors.NotFound:
            data = None
        with self._lock:
            if self._size + len(data or b"") <= _MAX_HELD and key not in self._held:
                self._size += len(data or b"")
                self._held[key] = data
        return data

    def of(self, image: str) -> str:
        """The container of ``image``. Blocks."""
        with self._lock:
            if image not in self._made:
                made = self._client.api.create_container(
                    image, command=[], entrypoint=["/"], labels=self._labels, network_disabled=True
                )
                self._made[image] = made["Id"]
            return self._made[image]

    def close(self) -> None:
        """Remove them. Idempotent."""
        with self._lock:
            for container in self._made.values():
                reaper.remove(self._client, container)
            self._made.clear()


@dataclass(frozen=True)
class Found:
    """The paths that an image has, and a tar archive of them, to be unpacked at ``/``."""

    paths: frozenset[str]
    archive: bytes


def read(pristine: Pristine, image: str, paths: Sequence[str]) -> Found:
    """Read ``paths`` (absolute, no link in the way) of ``image``; folders as a whole. Blocks.

    Raises:
        docker.errors.APIError: the daemon cannot.
    """
    found: set[str] = set()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out:
        for path in sorted(paths):
            data = pristine.read(image, path)
            if data is None:
                continue
            with tarfile.open(fileobj=io.BytesIO(data)) as one:
                _copy(one, out, posixpath.dirname(path))
            found.add(path)
    return Found(frozenset(found), buffer.getvalue())


def write(client: docker.DockerClient, container: str, found: Found) -> None:
    """Unpack in a container; what is in the way is replaced. The daemon does it, no program in there. Blocks.

    Raises:
        docker.errors.APIError: the daemon cannot.
    """
    client.api.put_archive(container, "/", found.archive)


def _link_kept(archive: bytes, found: Mapping[str, Any]) -> bytes:
    """The archive of a path of which the daemon says ``found``; podman follows a link, and archives what it is to."""
    if not found.get("mode", 0) & _GO_SYMLINK:
        return archive
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        link = next(iter(tar))
    if link.issym():
        return archive
    link.type, link.linkname, link.size, link.mode = tarfile.SYMTYPE, found["linkTarget"], 0, 0o777
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out:
        out.addfile(link)
    return buffer.getvalue()


def _copy(source: tarfile.TarFile, out: tarfile.TarFile, folder: str) -> None:
    for member in source:
        data = source.extractfile(member) if member.isreg() else None
        member.name = posixpath.join(folder, member.name).lstrip("/")
        if member.islnk():
            member.linkname = posixpath.join(folder, member.linkname).lstrip("/")
        out.addfile(member, data)
