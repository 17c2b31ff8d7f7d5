"""The backend for containers: one for each episode, from the task's own image, through the Docker Engine API."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from termrl.errors import CommandError, SandboxLostError, SandboxStartError, TaskError
from termrl.sandboxes.base import DEFAULT_WORKDIR, Privileges, SandboxProvider, SandboxSpec
from termrl.sandboxes.docker import options, reaper
from termrl.sandboxes.docker.connection import Connection, said_by, started_threads
from termrl.sandboxes.docker.container import DockerSandbox
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.images import ImageStore
from termrl.sandboxes.docker.pristine import Pristine
from termrl.sandboxes.host import state_folder
from termrl.sandboxes.stage import INSIDE, stage
from termrl.sandboxes.sweep import Owner, Swept

DEFAULT_TTL_S = 24 * 3600.0

_IMAGES_AT_ONCE = 8

# What a daemon, by its id, has been found to be unable to do.
_known: dict[str, options.Extras] = {}


class DockerProvider(SandboxProvider):
    """Makes containers on one daemon; use it in one event loop at a time.

    Args:
        host: where the daemon listens, such as ``unix:///var/run/docker.sock``; ``None`` for ``$DOCKER_HOST``, else
            that socket. podman's socket works as far as its API is the same.
        state: the state folder (see :func:`termrl.sandboxes.host.state_folder`).
        ttl_s: seconds after which a container ends by itself, whatever became of its owner.
        threads: how many calls can wait for the daemon at once.
        host_image: the image of tasks that run on any host's programs and name no image; without it they are refused.
        images: how images are had, the ``[images]`` table of a configuration.

    Raises:
        ConfigError: bad settings of images.
        SandboxStartError: no daemon answers, this user may not ask it, or the state folder cannot be used.
    """

    name = "docker"

    def __init__(
        self,
        *,
        host: str | None = None,
        state: Path | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        threads: int = 16,
        host_image: str | None = None,
        images: ImageSettings | Mapping[str, Any] | None = None,
    ) -> None:
        image_settings = ImageSettings.of(images)
        self._state = state_folder(Path(state) if state else None)
        self.daemon = Connection(host, threads=threads)
        try:
            self._stage = stage(self._state, bubblewrap=False)
            self.swept_first = self.sweep().sandboxes
            self._networks = {one["Name"] for one in self.daemon.client.api.networks()}
        except BaseException:
            self.daemon.close()
            raise
        self._owner = Owner(self._state)
        self._ttl_s = ttl_s
        self._host_image = host_image
        self._images = ImageStore(self.daemon.client, image_settings, state=self._state, labels=self.labels("image"))
        # Threads of their own: a pull can take an hour, and containers must be stopped meanwhile.
        self._image_threads = started_threads(_IMAGES_AT_ONCE, "termrl-images")
        self.pristine = Pristine(self.daemon.client, self.labels("image"))
        (self._owner.folder / "empty").touch(0o644)
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._names = itertools.count(1)
        cpus = int(self.daemon.info.get("NCPU") or os.cpu_count() or 1)
        self._extras = _known.get(self.daemon.id) or options.Extras(cpus, quota=_may_have_quota(self.daemon.info))
        self._closed = False
        self._reaper = reaper.Reaper(self.sweep)
        atexit.register(self._release)

    @property
    def live(self) -> int:
        return len(self._sandboxes)

    @property
    def limits(self) -> dict[str, str]:
        info = self.daemon.info
        version = info.get("CgroupVersion") or "1"
        found = {"open files": f"RLIMIT_NOFILE, {options.MAX_FILES} for each process"}
        for resource, key in (("memory", "MemoryLimit"), ("processes", "PidsLimit"), ("cpus", "CpuCfsQuota")):
            if info.get(key):
                found[resource] = f"cgroups v{version}"
        if self._extras.quota:
            found["files"] = f"quota of {info['Driver']} on {_backing(info)}"
        return found

    @property
    def privileges(self) -> Privileges:
        mapped = any("userns" in one or "rootless" in one for one in self.daemon.info.get("SecurityOptions") or [])
        return Privileges(
            options.COMMAND_CAPABILITIES,
            setuid=True,
            kernel_root=not mapped,
            # podman's own filter of system calls allows them, and its API has no read-only paths for the first
            # process's oom_score_adj
            user_namespaces=self.daemon.podman,
            first_process_at_risk=self.daemon.podman or not self._extras.first_capability,
        )

    def sweep(self) -> Swept:
        return reaper.sweep(self.daemon.client, self._state)

    def remains(self) -> list[str]:
        return reaper.remains(self.daemon.client, self._state)

    def refusal(self, spec: SandboxSpec) -> str | None:
        if spec.network_mode == "allowlist":
            return "network_mode allowlist: containers have the whole network or none"
        if spec.network_mode == "public" and "bridge" not in self._networks:
            return "network_mode public: this daemon has no bridge network"
        if spec.gpus:
            return f"gpus = {spec.gpus}: the docker backend gives none"
        if spec.image is None and spec.build is None and spec.host_userland:
            return None if self._host_image else "has no image; host_image says which one such tasks get"
        if spec.image is None and spec.build is None:
            return "has neither docker_image nor environment/Dockerfile"
        return None

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        if why := self.refusal(spec):
            raise TaskError(f"{spec.task_id}: {why}", hint="use another --sandbox for this task, or change the task")
        if self._closed:
            raise SandboxStartError("the sandbox provider is closed")
        if spec.image is None and spec.build is None:
            spec = replace(spec, image=self._host_image)
        image = self._images.known(spec)
        if image is None:
            image = await asyncio.get_running_loop().run_in_executor(self._image_threads, self._images.ensure, spec)
        effective = replace(
            spec,
            env={**image.env, **spec.env},
            workdir=spec.workdir or image.workdir or DEFAULT_WORKDIR,
            user=spec.user or image.user,
            verifier_user=spec.verifier_user or image.user,
        )
        name = f"{reaper.PREFIX}{self._owner.name}-{next(self._names)}"
        sandbox = DockerSandbox(self, effective, name, self._owner.folder / name, image.id)
        self._sandboxes[name] = sandbox
        try:
            await sandbox.start(lambda address: self._begin(sandbox, address))
            await sandbox.furnish(options.bounds_fields(effective))
            if spec.healthcheck is not None:
                await sandbox.become_healthy(spec.healthcheck)
        except BaseException as error:
            await sandbox.stop()
            if isinstance(error, CommandError | SandboxLostError | SandboxStartError | OSError):
                raise _start_error(spec, error) from error
            raise
        return sandbox

    async def close(self) -> None:
        self._closed = True
        self._images.close()
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes.values())))
        await asyncio.to_thread(self._reaper.close)
        await asyncio.to_thread(self.pristine.close)
        await asyncio.to_thread(self._image_threads.shutdown)
        await asyncio.to_thread(self.daemon.close)
        self._owner.release()
        atexit.unregister(self._release)

    def labels(self, task_id: str) -> dict[str, str]:
        """What a container of this provider is known by."""
        return reaper.labels(self._owner.name, task_id, self._ttl_s)

    def forget(self, name: str) -> None:
        """A sandbox has ended."""
        self._sandboxes.pop(name, None)

    def runner_argv(self, socket_path: str) -> list[str]:
        """How a further resident is run in a container."""
        return [*self._stage.argv(INSIDE, "container"), socket_path]

    # -- parts of create -----------------------------------------------------------------------------------------

    def _begin(self, sandbox: DockerSandbox, address: str) -> None:
        """Make and start the container of ``sandbox``, whose first process calls at ``address``. Blocks."""
        folder = self._owner.folder
        bounds = [
            options.Bound(self._stage.folder, INSIDE),
            options.Bound(folder / sandbox.id / "run", options.RUN),
            options.Bound(sandbox.tests, options.TESTS),
            options.Bound(folder / "empty", options.PRELOAD),
        ]
        client = self.daemon.client
        while True:
            extras = self._extras
            try:
                made = options.create(
                    client,
                    sandbox.id,
                    sandbox.image,
                    sandbox.spec,
                    command=[*self.runner_argv(address), f"{self._ttl_s:.0f}"],
                    bounds=bounds,
                    labels=self.labels(sandbox.spec.task_id),
                    extras=extras,
                )
                client.api.start(made)
                return
            except Exception as error:
                less = extras.without(said_by(error))
                if less is None:
                    raise self._refused(sandbox.spec, said_by(error)) from error
            # Not every daemon can do everything; what this one cannot is not asked of it again.
            reaper.remove(client, sandbox.id)
            self._extras = _known[self.daemon.id] = less

    def _refused(self, spec: SandboxSpec, said: str) -> SandboxStartError:
        """The error for a container that the daemon did not make or start."""
        if "bind source path does not exist" in said:
            return SandboxStartError(
                f"{spec.task_id}: the daemon at {self.daemon.host} does not see this machine's files ({said})",
                hint="use a daemon on this machine; if termrl runs in a container, mount a folder of the daemon's "
                "machine into it at the same path and set TERMRL_STATE_DIR to it",
            )
        return SandboxStartError(said)

    def _release(self) -> None:
        """At the end of a process that did not close its provider."""
        with contextlib.suppress(Exception):
            reaper.remove_owned(self.daemon.client, self._owner.name)
        self._owner.release()


def _start_error(spec: SandboxSpec, error: BaseException) -> SandboxStartError:
    said = str(error).removeprefix(f"{spec.task_id}: ")
    if isinstance(error, SandboxStartError) and (error.hint or type(error) is not SandboxStartError):
        return error
    return SandboxStartError(
        f"{spec.task_id}: the container did not start: {said}", hint="termrl doctor --sandbox docker checks the daemon"
    )


def _may_have_quota(info: Mapping[str, Any]) -> bool:
    return info.get("Driver") == "overlay2" and _backing(info) == "xfs"


def _backing(info: Mapping[str, Any]) -> str:
    return dict(info.get("DriverStatus") or []).get("Backing Filesystem", "")
