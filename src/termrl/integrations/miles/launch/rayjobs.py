"""Steps as jobs of a Ray cluster, through Ray's own job API; ``ray`` is imported when a cluster is asked."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO

from termrl.errors import ConfigError, TermrlError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient  # pyright: ignore[reportMissingImports]

_LOOK_S = 0.5
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class RayError(TermrlError):
    """The Ray cluster does not answer, or not as one."""


class RayJobs:
    """The jobs of one cluster.

    Args:
        address: of its dashboard, ``http://HEAD:8265``.

    Raises:
        ConfigError: ``ray`` is not installed here.
        RayError: nobody answers there.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._client = _connect(address)

    def submit(self, job: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Submit a command under an id of the caller's. ``env`` is kept by Ray in plain text."""
        try:
            self._client.submit_job(
                entrypoint=shlex.join(words),
                submission_id=job,
                runtime_env={"env_vars": dict(env)},
            )
        except RuntimeError as error:
            raise RayError(f"{self.address}: the job {job} is refused: {_first_line(error)}") from None

    def follow(self, job: str, out: BinaryIO) -> str:
        """Write what a job prints to ``out`` until it ends; returns how: SUCCEEDED, FAILED or STOPPED."""
        with contextlib.suppress(RuntimeError, OSError):
            asyncio.run(self._tail(job, out))
        while (status := self.status(job)) not in _ENDED:
            time.sleep(_LOOK_S)
        return status

    def logs(self, job: str) -> str:
        """All that a job printed so far."""
        return str(self._client.get_job_logs(job))

    def status(self, job: str) -> str:
        """PENDING, RUNNING or how it ended."""
        return str(self._client.get_job_status(job).value)

    def stop(self, job: str, *, wait_s: float = 30.0) -> bool:
        """End a job and what it started, and wait for that; ``False`` where it had ended or is unknown."""
        try:
            if self.status(job) in _ENDED:
                return False
            self._client.stop_job(job)
            give_up = time.monotonic() + wait_s
            while self.status(job) not in _ENDED and time.monotonic() < give_up:
                time.sleep(_LOOK_S)
        except RuntimeError:
            return False
        return True

    async def _tail(self, job: str, out: BinaryIO) -> None:
        async for text in self._client.tail_job_logs(job):
            out.write(text.encode())
            out.flush()


def _connect(address: str) -> JobSubmissionClient:
    try:
        from ray.job_submission import JobSubmissionClient  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"cluster.ray_address {address}: ray is not installed here",
            hint="pip install 'ray[default]' of the cluster's version",
        ) from None
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RayError(
            f"cluster.ray_address {address}: {_first_line(error)}",
            hint="the dashboard's address, http://HEAD:8265; ray start --head --dashboard-host=0.0.0.0 opens it",
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
