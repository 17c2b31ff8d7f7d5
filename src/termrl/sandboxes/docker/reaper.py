"""Containers whose owner is dead: what they are known by, finding them, and removing them. Others are never touched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termrl.sandboxes import sweep as folders
from termrl.sandboxes.sweep import Swept, boot_id, still_runs, this_process

if TYPE_CHECKING:
    import docker

OWNER = "termrl.owner"
TASK = "termrl.task"
PREFIX = "termrl-"

_DEADLINE = "termrl.deadline"
_FACTS = ("pid", "start", "boot", "pidns")
_PERIOD_S = 60.0
_TRIES = 100


def labels(owner: str, task_id: str, lifetime_s: float) -> dict[str, str]:
    """What a container of this process is known by."""
    facts = {f"termrl.{name}": str(value) for name, value in this_process().items()}
    return {OWNER: owner, TASK: task_id, _DEADLINE: f"{time.time() + lifetime_s:.0f}", **facts}


def orphans(client: docker.DockerClient) -> list[dict[str, Any]]:
    """The containers of dead owners, as the daemon lists them."""
    return [one for one in _ours(client) if is_orphan(one["Labels"], one.get("State", ""))]


def is_orphan(found: Mapping[str, str], state: str, now: float | None = None) -> bool:
    """Whether nobody can need the container any more.

    One of another boot may be of another machine that shares the daemon: it is an orphan when it has ended, or when
    its time is over.
    """
    now = time.time() if now is None else now
    try:
        if now > float(found[_DEADLINE]):
            return True
        facts: dict[str, Any] = {name: found[f"termrl.{name}"] for name in _FACTS}
        facts |= {"start": int(facts["start"]), "pid": int(facts["pid"])}
    except (KeyError, ValueError):
        # Labels that this program did not write.
        return False
    if facts["boot"] != boot_id():
        return state in ("exited", "dead")
    return not still_runs(facts)


def remove(client: docker.DockerClient, container: str) -> bool:
    """Kill and remove a container with its anonymous volumes; whether it was there."""
    import docker.errors

    for _ in range(_TRIES):
        try:
            client.api.remove_container(container, force=True, v=True)
            return True
        except docker.errors.NotFound:
            return False
        except docker.errors.APIError as error:
            # Someone else is removing it, or it has not quite started: soon it is gone or can be removed.
            if error.status_code != 409 and "in progress" not in str(error):
                raise
            time.sleep(0.05)
    return True


def remove_owned(client: docker.DockerClient, owner: str) -> None:
    """Remove all containers of one owner."""
    for one in client.api.containers(all=True, filters={"label": f"{OWNER}={owner}"}):
        remove(client, one["Id"])


def sweep(client: docker.DockerClient, state: Path | None = None) -> Swept:
    """Remove what dead owners have left: containers, then what :func:`termrl.sandboxes.sweep.sweep` removes."""
    removed = sum(remove(client, one["Id"]) for one in orphans(client))
    swept = folders.sweep(state)
    swept.containers = removed
    return swept


def remains(client: docker.DockerClient, state: Path | None = None) -> list[str]:
    """What dead owners have left, one line each."""
    names = [name.lstrip("/") for one in orphans(client) for name in one["Names"]]
    return [*(f"container {name}" for name in names), *folders.remains(state)]


class Reaper:
    """Removes orphans every minute, in a thread of its own.

    Args:
        reap: what to do each time; what it raises is tried again the next time.
    """

    def __init__(self, reap: Callable[[], object], period_s: float = _PERIOD_S) -> None:
        self._reap = reap
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="termrl-docker-reaper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            try:
                self._reap()
            except Exception:
                # The daemon may be restarting.
                continue


def _ours(client: docker.DockerClient) -> list[dict[str, Any]]:
    return client.api.containers(all=True, filters={"label": OWNER})
