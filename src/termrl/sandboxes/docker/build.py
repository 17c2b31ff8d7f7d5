"""Building an image from a task's ``environment/Dockerfile``, with its log kept and its time bounded."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import docker
import docker.errors
import docker.utils.build
import requests.exceptions
import urllib3.exceptions

from termrl.errors import ImageError
from termrl.sandboxes.output import BoundedOutput

_LOG_BYTES = 4 << 20
_TAIL_BYTES = 64 << 10
_POLL_S = 0.2
_STOP_S = 5.0
_IN_CONTEXT = ".termrl.Dockerfile"
_LAYER = re.compile(r" ---> ([0-9a-f]{12,})\s*")
_CREDENTIALS = re.compile(rb"(://)[^/\s@]+@")

# The build ends with us: when this process is killed, its end of the pipe closes and the guard stops the program.
_GUARDED = 'exec 3<&0 </dev/null; (read -r _ <&3 || kill -TERM $$) >/dev/null 2>&1 & exec "$@" 3<&-'


@dataclass(frozen=True)
class BuildPlan:
    """One build.

    Attributes:
        context: the folder that COPY reads from.
        dockerfile: the Dockerfile to build, in or outside of the context.
        tag: name of the image.
        labels: put on the image.
        timeout_s: seconds after which the build is killed.
        log: file that is written with what the builder says.
        secrets: files that RUN steps may mount, by id.
        platform: such as ``linux/amd64``, or ``None``.
        network: ``default`` or ``none``.
    """

    context: Path
    dockerfile: Path
    tag: str
    labels: Mapping[str, str]
    timeout_s: float
    log: Path
    secrets: Mapping[str, Path]
    platform: str | None
    network: str


class BuildFailed(Exception):
    """A build that ended without an image; ``tail`` is the end of what the builder said."""

    def __init__(self, tail: str, *, stopped: str = "") -> None:
        super().__init__(stopped or tail[-200:])
        self.tail = tail
        self.stopped = stopped


class BuildLog:
    """A file that takes a bounded amount of a builder's words, credentials in addresses masked; keeps their end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._tail = BoundedOutput(2 * _TAIL_BYTES)
        self._partial = b""
        self._written = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._add(line + b"\n")
        if len(self._partial) > _TAIL_BYTES:
            self.flush()

    def flush(self) -> None:
        """Take an unfinished last line too."""
        self._add(self._partial)
        self._partial = b""
        self._file.flush()

    def tail(self) -> str:
        """The end of what was said."""
        head, tail = self._tail.parts()
        return (tail or head).decode("utf-8", "replace")

    def _add(self, line: bytes) -> None:
        line = _CREDENTIALS.sub(rb"\1***@", line)
        self._tail.feed(line)
        room = _LOG_BYTES - self._written
        if room > 0:
            self._file.write(line[:room])
            if len(line) >= room:
                self._file.write(b"\n[... the rest of the log is left out ...]\n")
        self._written += len(line)


def build_with_command_line(
    program: Path, plan: BuildPlan, *, environ: Mapping[str, str], closing: Callable[[], bool]
) -> None:
    """Build by ``docker build`` with BuildKit.

    Raises:
        BuildFailed: it failed, took too long, or the caller is closing.
    """
    argv = [str(program), "build", "--progress=plain", "--file", str(plan.dockerfile), "--tag", plan.tag]
    argv += [f"--label={name}={value}" for name, value in plan.labels.items()]
    argv += [f"--secret=id={name},src={file}" for name, file in plan.secrets.items()]
    argv += [f"--platform={plan.platform}"] if plan.platform else []
    argv += ["--network=none"] if plan.network == "none" else []
    argv.append(str(plan.context))
    deadline = time.monotonic() + plan.timeout_s
    with _log(plan) as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDED, "sh", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            stopped = _follow(process, log, deadline, plan, closing)
            code = None if stopped else process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            stopped, code = "the docker program did not end", None
        finally:
            _end(process)
        log.flush()
        if stopped or code != 0:
            raise BuildFailed(log.tail(), stopped=stopped)


def build_with_engine(client: docker.DockerClient, plan: BuildPlan, *, closing: Callable[[], bool]) -> None:
    """Build by the Engine API's classic builder, which knows neither heredocs nor mounts.

    Raises:
        BuildFailed: it failed, took too long, or the caller is closing.
    """
    deadline = time.monotonic() + plan.timeout_s
    layer = ""
    with _log(plan) as log, _packed(plan) as context:
        try:
            events: Iterator[dict[str, Any]] = client.api.build(
                fileobj=context,
                custom_context=True,
                dockerfile=_IN_CONTEXT,
                tag=plan.tag,
                labels=dict(plan.labels),
                platform=plan.platform,
                network_mode="none" if plan.network == "none" else None,
                rm=True,
                forcerm=True,
                decode=True,
                timeout=int(plan.timeout_s) + 1,
            )
            for event in events:
                said = str(event.get("error") or event.get("stream") or event.get("status") or "")
                log.feed(said.encode())
                if made := _LAYER.fullmatch(said):
                    layer = made[1]
                stopped = _stopped(deadline, plan, closing)
                if stopped or "error" in event:
                    raise BuildFailed("", stopped=stopped)
        except BuildFailed as failed:
            log.flush()
            _remove_layer(client, layer)
            raise BuildFailed(log.tail(), stopped=failed.stopped) from None
        except docker.errors.APIError as error:
            raise BuildFailed(str(error.explanation)) from None
        except (
            requests.exceptions.RequestException,
            urllib3.exceptions.HTTPError,
            docker.errors.DockerException,
        ) as error:
            stopped = _stopped(deadline, plan, closing)
            raise BuildFailed("", stopped=stopped or f"the daemon does not answer: {error}") from None
        log.flush()


@contextlib.contextmanager
def _packed(plan: BuildPlan) -> Iterator[IO[bytes]]:
    """The context as the Engine API takes it, with the Dockerfile in it wherever that is."""
    ignored = plan.context / ".dockerignore"
    lines = ignored.read_text(errors="replace").splitlines() if ignored.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    dockerfile = (_IN_CONTEXT, plan.dockerfile.read_text())
    made: Any = docker.utils.build.tar(plan.context, exclude=patterns, dockerfile=dockerfile, gzip=False)
    with made as context:
        yield context


def _remove_layer(client: docker.DockerClient, image: str) -> None:
    """Remove what the steps before the failed one made, unless it is an image with a name."""
    with contextlib.suppress(docker.errors.APIError):
        if image and not client.api.inspect_image(image)["RepoTags"]:
            client.api.remove_image(image)


def explain(failed: BuildFailed, *, daemon: str, heredoc: bool) -> tuple[str, str | None]:
    """What went wrong in a build, in one line, and a hint where there is one.

    Args:
        daemon: what builds, such as ``the daemon (20.10.24)``.
        heredoc: the Dockerfile holds heredocs.
    """
    tail = failed.tail
    if failed.stopped:
        return failed.stopped, None
    if "no space left on device" in tail.lower():
        return "the disk is full", "free some of the daemon's disk: docker system df, docker builder prune"
    parse = re.search(
        r"(dockerfile parse error.*|unknown instruction.*|failed to parse dockerfile.*|no FROM statement.*)", tail, re.I
    )
    if parse:
        hint = "its heredocs need Docker 23 or later" if heredoc else None
        return f"{daemon} cannot parse it: {parse[1].strip()}", hint
    copy = re.search(
        r"(?:failed to compute cache key|failed to calculate checksum|(?:COPY|ADD) failed|checking on sources)[^\n]*",
        tail,
    )
    if copy:
        return f"a COPY source is missing: {_last_part(copy[0])}", "files left out by .dockerignore are missing too"
    base = re.search(r"[^\n]*(?:failed to resolve source metadata for|pull access denied for)[^\n]*", tail)
    base = base or re.search(r"[^\n]*(?:failed to do request|creating build container):[^\n]*", tail)
    if base:
        hint = "[images.aliases] can name an image that is here in its place"
        return f"its base image cannot be had: {' '.join(base[0].split())[-300:]}", hint
    step = re.search(
        r"(?:executor failed running|process) [\[\"](.*)[\]\"][:,]? .*?(?:exit code: ?|code: )(\d+)", tail, re.DOTALL
    )
    step = step or re.search(r"The command '(.*)' returned a non-zero code: (\d+)", tail, re.DOTALL)
    step = step or re.search(r'building at STEP "RUN (.*)": while running runtime: exit status (\d+)', tail, re.DOTALL)
    if step:
        command = step[1].removeprefix("/bin/sh -c ")
        return f"exit code {step[2]} of RUN {' '.join(command.split())[:200]}", None
    lines = [line for line in tail.splitlines() if line.strip()]
    return " ".join((lines[-1] if lines else "it said nothing").split())[:300], None


def _last_part(text: str) -> str:
    return text.split(": ", 1)[-1].strip()


@contextlib.contextmanager
def _log(plan: BuildPlan) -> Iterator[BuildLog]:
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with plan.log.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            yield BuildLog(file)
    except OSError as error:
        raise ImageError(f"{plan.log}: {error.strerror or error}") from error


def _follow(
    process: subprocess.Popen[bytes], log: BuildLog, deadline: float, plan: BuildPlan, closing: Callable[[], bool]
) -> str:
    """Feed the log until the program's output ends; why it has to be stopped, or an empty text."""
    assert process.stdout is not None
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN | select.POLLHUP)
    while True:
        if stopped := _stopped(deadline, plan, closing):
            return stopped
        if poller.poll(_POLL_S * 1000):
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                return ""
            log.feed(data)


def _stopped(deadline: float, plan: BuildPlan, closing: Callable[[], bool]) -> str:
    if closing():
        return "the sandboxes are being closed"
    return f"it took longer than {plan.timeout_s:g} s and was stopped" if time.monotonic() > deadline else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop what still runs of the program and its guard, which is told first that all is well."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.write(b"\n")
        process.stdin.close()
    if process.poll() is None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
                break
    process.stdout.close()
