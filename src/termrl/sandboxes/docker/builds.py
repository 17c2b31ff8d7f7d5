"""Images built from Dockerfiles: one tag for each content, one build of it at a time on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event, Lock
from typing import Any

from termrl.errors import ImageError
from termrl.sandboxes.base import ImageBuild
from termrl.sandboxes.docker.build import (
    BuildFailed,
    BuildPlan,
    build_with_command_line,
    build_with_engine,
    explain,
)
from termrl.sandboxes.docker.command import CommandLine, command_environment, find_command_line
from termrl.sandboxes.docker.daemon import Daemon
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.pull import CLOSING, is_rate_limit, rate_limited
from termrl.sandboxes.docker.references import Aliases
from termrl.sandboxes.docker.rewrite import APT_CONFIG, APT_SECRET, CA_SECRET, has_heredoc, rewrite
from termrl.tasks.folder import read_text
from termrl.tasks.seal import tree_digest

REPOSITORY = "termrl/build"
LABEL = "termrl.build"
_LOGS_KEPT = 200
_POLL_S = 0.2


class Builds:
    """Builds images.

    Args:
        folder: for locks, logs and the files that a build needs beside its context.
        closing: once set, builds and waiting end with an error.
    """

    def __init__(self, daemon: Daemon, settings: ImageSettings, *, folder: Path, closing: Event) -> None:
        self._daemon = daemon
        self._settings = settings
        self._aliases = Aliases(settings.aliases)
        self._folder = folder
        self._closing = closing
        self._guard = Lock()
        self._command_line: CommandLine | None = None
        self._sweep()

    def ensure(self, build: ImageBuild) -> tuple[str, Mapping[str, Any]]:
        """The tag of what ``build`` builds, and what the daemon says of it; built unless it is there already.

        Raises:
            RateLimitError: a registry does not give out a base image for now.
            ImageError: it was not built; says why and where the log is.
        """
        dockerfile = build.context / "Dockerfile"
        original = read_text(dockerfile)
        text, bases = rewrite(original, alias=self._aliases.of, ca=self._settings.ca_file is not None)
        name = self._name(build.context, text, bases)
        tag = f"{REPOSITORY}:{name}"
        if (attrs := self._daemon.find(tag)) is not None:
            return tag, attrs
        timeout_s = min(build.timeout_s, self._settings.build_timeout_s)
        with self._lock(name, timeout_s), self._scratch(name) as scratch:
            if (attrs := self._daemon.find(tag)) is not None:
                return tag, attrs
            plan = BuildPlan(
                context=build.context,
                dockerfile=dockerfile if text == original else _write(scratch / "Dockerfile", text),
                tag=tag,
                labels={LABEL: name},
                timeout_s=timeout_s,
                log=self._folder / "logs" / f"{name}.log",
                secrets=self._secrets(scratch),
                platform=self._settings.platform,
                network=self._settings.build_network,
            )
            self._build(plan, dockerfile, original)
        self._prune_logs()
        attrs = self._daemon.find(tag)
        if attrs is None:
            raise ImageError(
                f"{dockerfile}: built, but {self._daemon.name} does not have the image",
                hint="is another builder than the daemon's own the default? (docker buildx ls)",
            )
        return tag, attrs

    def _name(self, context: Path, text: str, bases: tuple[str, ...]) -> str:
        """What the image depends on, as a digest: the folder, the Dockerfile as built, what aliases stand for."""
        ids = [str((self._daemon.find(base) or {}).get("Id", base)) for base in bases]
        parts = [tree_digest(context), text, self._settings.platform or "", self._settings.build_network, *ids]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def _build(self, plan: BuildPlan, dockerfile: Path, text: str) -> None:
        program, why_not = self._builder()
        heredoc = has_heredoc(text)
        if program is None:
            lacking = "heredocs" if heredoc else "--mount" if "--mount=" in text else ""
            lacking = "images.ca_file" if plan.secrets else lacking
            if lacking:
                raise ImageError(
                    f"{dockerfile}: {lacking}: not built without BuildKit: {why_not}",
                    hint="install Docker's command line with the plugin buildx",
                )
        try:
            if program is None:
                build_with_engine(self._daemon.client, plan, closing=self._closing.is_set)
            else:
                environ = command_environment(self._daemon.address, os.environ)
                build_with_command_line(program, plan, environ=environ, closing=self._closing.is_set)
        except BuildFailed as failed:
            log = f"(log: {plan.log})"
            if not failed.stopped and (limited := _rate_limit_line(failed.tail)):
                raise rate_limited(f"{dockerfile}: a base image was not pulled {log}", limited) from None
            why, hint = explain(failed, daemon=self._daemon.name, heredoc=heredoc)
            raise ImageError(f"{dockerfile}: not built: {why} {log}", hint=hint) from None

    def _builder(self) -> tuple[Path | None, str]:
        """The docker program to build with, or ``None`` (the Engine API's builder) and why not BuildKit."""
        if self._settings.builder == "classic":
            return None, 'the setting is builder = "classic"'
        if self._daemon.podman:
            found = CommandLine(None, f"{self._daemon.name} has none")
        else:
            with self._guard:
                found = self._command_line = self._command_line or find_command_line(os.environ)
        if found.program is None and self._settings.builder == "buildkit":
            raise ImageError(
                f"images cannot be built with BuildKit: {found.why_not}",
                hint="install Docker's command line with the plugin buildx (before version 23 it needs no plugin)",
            )
        return found.program, found.why_not

    def _secrets(self, scratch: Path) -> dict[str, Path]:
        """The certificates for a build's RUN steps: the machine's own and the extra one."""
        extra = self._settings.ca_file
        if extra is None:
            return {}
        known = ssl.get_default_verify_paths().cafile
        try:
            bundle = (Path(known).read_text() + "\n" if known else "") + extra.expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ImageError(f"images.ca_file: {extra}: cannot be read: {error}") from None
        return {CA_SECRET: _write(scratch / "ca.pem", bundle), APT_SECRET: _write(scratch / "apt.conf", APT_CONFIG)}

    @contextlib.contextmanager
    def _lock(self, name: str, timeout_s: float) -> Iterator[None]:
        """Held by one thread of one process at a time."""
        deadline = time.monotonic() + timeout_s
        while not (lock := self._try_lock(name)):
            if self._closing.wait(_POLL_S):
                raise ImageError(f"not built: {CLOSING}")
            if time.monotonic() > deadline:
                raise ImageError(f"another process has been building this image for {timeout_s:g} s")
        try:
            yield
        finally:
            self._unlock(name, lock)

    def _try_lock(self, name: str) -> int:
        """The descriptor of the lock that is ours now, or 0 if another has it."""
        path = self._folder / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder takes the file away: a lock on what is no longer there is none.
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        return 0

    def _unlock(self, name: str, lock: int) -> None:
        (self._folder / "locks" / name).unlink(missing_ok=True)
        os.close(lock)

    @contextlib.contextmanager
    def _scratch(self, name: str) -> Iterator[Path]:
        """A folder for the files of one build; belongs to whoever holds the lock of that name."""
        scratch = self._folder / "scratch" / name
        scratch.mkdir(parents=True, exist_ok=True)
        scratch.chmod(0o700)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove the files of builds whose process was killed."""
        for scratch in (self._folder / "scratch").glob("*"):
            if lock := self._try_lock(scratch.name):
                shutil.rmtree(scratch, ignore_errors=True)
                self._unlock(scratch.name, lock)

    def _prune_logs(self) -> None:
        logs = sorted((self._folder / "logs").glob("*.log"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in logs[_LOGS_KEPT:]:
            old.unlink(missing_ok=True)


def _rate_limit_line(tail: str) -> str:
    return next((line for line in reversed(tail.splitlines()) if is_rate_limit(line)), "")


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
