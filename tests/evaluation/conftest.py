"""Evaluations of tiny tasks, with a state folder of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from termrl.training.events import Silent, Watcher
from tests.endtoend.tiny import write_tasks
from tests.evaluation.chat_server import MODEL
from tests.states import in_own_state

Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session", autouse=True)
def state() -> Iterator[Path]:
    """A state folder of these tests' own, where a sandbox's user can walk to."""
    with in_own_state() as folder:
        yield folder


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "all", ("apple", "berry", "cedar"))


def flags(url: str, tasks: Path, **overrides: object) -> list[str]:
    settings: dict[str, object] = {
        "policy.base_url": url,
        "policy.model": MODEL,
        "tasks.dir": tasks,
        "episode.max_turns": 3,
        "retry_wait_s": 0.01,
        "retries": 1,
    }
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    return [f"--{key}={value}" for key, value in settings.items()]


@pytest.fixture
def evaluate(tasks: Path, tmp_path: Path) -> Evaluate:
    """Evaluate here an endpoint on the tiny tasks; gives the summary."""

    def run(
        url: str,
        *,
        environ: dict[str, str] | None = None,
        said: list[str] | None = None,
        watcher: Watcher | None = None,
        **overrides: Any,
    ) -> Any:
        from termrl.evaluation.config import EvalConfig
        from termrl.evaluation.run import evaluate, prepare
        from termrl.evaluation.store import EvalStore
        from termrl.settings import load_settings, to_toml

        say = (said if said is not None else []).append
        config = load_settings(EvalConfig, flags=flags(url, overrides.pop("tasks", tasks), **overrides)).config
        prepared = prepare(config, say, environ or {})
        with EvalStore.begin(tmp_path / "run", given="", resolved=to_toml(config)) as store:
            return asyncio.run(evaluate(config, store, watcher or Silent(), prepared=prepared, say=say))

    return run
