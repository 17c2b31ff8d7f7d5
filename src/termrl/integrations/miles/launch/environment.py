"""What an environment server offers, asked before a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from termrl.environment.address import Address, read_token
from termrl.environment.client import ClientOptions
from termrl.environment.probe import USABLE, probe
from termrl.environment.routes import get_json
from termrl.errors import EnvironmentLostError


@dataclass(frozen=True)
class Server:
    """An environment server.

    Attributes:
        tasks: ids of what it serves; ``None`` if it does not say.
        sessions: how many it takes at once; ``None`` if not known.
        memory_mb: what all tasks in session may use; ``largest_mb``: what one of the largest uses.
        canonical: whether it scores by the tasks' own tests; ``None`` if not known.
        verifier_s: seconds that the tests of each task may take.
    """

    tasks: frozenset[str] | None = None
    sessions: int | None = None
    memory_mb: int | None = None
    largest_mb: int = 0
    canonical: bool | None = None
    verifier_s: dict[str, float] = field(default_factory=dict)


async def look_at_server(url: str, *, token_file: Path | None, sessions: int, task_id: str | None) -> Server:
    """Ask a server: our own says all of it, any other is tried with one episode and ``sessions`` sessions.

    Raises:
        EnvironmentLostError: it does not answer, or does not work.
        ConfigError: it refuses the token, or the URL is none.
    """
    address, token = Address.of(url), read_token(token_file)
    await get_json(address, "/health", token=token)
    listed = _tasks(await get_json(address, "/tasks", token=token))
    capacity = await get_json(address, "/capacity", token=token)
    if listed is not None and isinstance(capacity, dict):
        budgets = {name: task.get("verifier_timeout_sec") for name, task in listed.items()}
        return Server(
            tasks=frozenset(listed),
            sessions=capacity.get("max_sessions"),
            memory_mb=capacity.get("max_memory_mb"),
            largest_mb=max((int(task.get("memory_mb") or 0) for task in listed.values()), default=0),
            canonical=True,
            verifier_s={name: float(s) for name, s in budgets.items() if isinstance(s, int | float)},
        )
    found = await probe(url, options=ClientOptions(token=token), task_id=task_id, sessions=sessions, rounds=1)
    if found.exit_code != USABLE:
        failed = found.failed
        raise EnvironmentLostError(
            f"{url}: {failed.name}: {failed.error}" if failed else f"{url} is not usable",
            hint=f"termrl probe {url} shows more",
        )
    if found.kind != "terminal":
        raise EnvironmentLostError(f"{url} is no terminal environment", hint=f"termrl probe {url} shows what it is")
    return Server(sessions=found.admitted, canonical=found.canonical)


def _tasks(answer: Any) -> dict[str, dict[str, Any]] | None:
    tasks = answer.get("tasks") if isinstance(answer, dict) else None
    if not isinstance(tasks, list):
        return None
    return {str(task["id"]): task for task in tasks if isinstance(task, dict) and "id" in task}
