"""Checks of the tasks and of where their episodes run."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from termrl.integrations.miles.launch.environment import look_at_server
from termrl.integrations.miles.launch.findings import Known, Problem, names
from termrl.runs.files import read_jsonl
from termrl.tasks.taskset import TaskSet
from termrl.validation.records import Status, read_report

HOSTED = ("daytona", "e2b", "agentenv", "modal")
RESULTS = "results.jsonl"

_NAMED = 5


def check_sandbox(known: Known) -> Iterator[Problem]:
    """Episodes run in one place, and in one that there is."""
    episodes = known.profile.episodes
    backend = (episodes.sandbox_backend or "").strip().lower()
    variable = "OPENENV_SANDBOX_BACKEND"
    if backend in HOSTED:
        yield Problem(
            "sandbox",
            f"{variable}={backend}: hosted sandboxes are not supported",
            f"unset {variable} and serve the tasks (termrl serve, OPENENV_ENV_URL), or bubblewrap, or docker",
        )
    elif backend and backend not in ("bubblewrap", "docker"):
        yield Problem("sandbox", f"{variable}={backend}: no such backend", "bubblewrap or docker")
    if backend and not episodes.tasks_dir:
        yield Problem(
            "sandbox",
            f"{variable} is set, but not the folder of the tasks",
            "OPENENV_TB2_TASKS_DIR=FOLDER, the same on every worker",
        )
    if backend and episodes.url:
        yield Problem(
            "sandbox", f"{variable} and OPENENV_ENV_URL (episodes.url) are both set", "unset the one that is not meant"
        )


def check_prompt_data(known: Known) -> Iterator[Problem]:
    """Every row of the prompt file can be used."""
    path = Path(known.profile.paths.prompt_data)
    hint = "termrl tasks rows TASKS -o train.jsonl writes it; --set paths.prompt_data=FILE"
    if known.facts is not None and str(path) in known.facts.unreadable:
        yield Problem("prompt-data", f"{path}: missing or empty where miles runs", hint)
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        yield Problem("prompt-data", f"{path}: cannot be read here: {getattr(error, 'strerror', None) or error}", hint)
        return
    bad = []
    for number, line in enumerate(lines, start=1):
        try:
            known.rows.append(_task_of(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            bad.append(f"line {number}: {error}")
    if bad:
        more = f" (and {len(bad) - _NAMED} more)" if len(bad) > _NAMED else ""
        yield Problem("prompt-data", f"{path}: {'; '.join(bad[:_NAMED])}{more}", hint)
    needed = known.profile.rollout.rollout_batch_size
    if not bad and len(lines) < needed:
        yield Problem(
            "prompt-data",
            f"{path}: {len(lines)} rows, fewer than rollout.rollout_batch_size {needed}",
            "more tasks, or a smaller batch",
        )


def _task_of(row: Any) -> str:
    if not isinstance(row, dict):
        raise TypeError("not an object")
    prompt, metadata = row.get("prompt"), row.get("metadata")
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and m.get("role") for m in prompt):
        raise ValueError("prompt is not a list of chat messages")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("task_id"), str) or not metadata["task_id"]:
        raise ValueError("metadata.task_id is missing")
    return metadata["task_id"]


def check_environment(known: Known) -> Iterator[Problem]:
    """The environment server has the room, and scores as the tasks say."""
    profile = known.profile
    if profile.env_url is None:
        if profile.episodes.tasks_dir and Path(profile.episodes.tasks_dir).is_dir():
            tasks = TaskSet.load(Path(profile.episodes.tasks_dir), skip_broken=True)
            known.served = frozenset(tasks)
            known.verifier_s = {task.id: task.verifier_timeout_s for task in tasks.values()}
        return
    token_file = profile.episodes.token_file
    server = asyncio.run(
        look_at_server(
            profile.env_url,
            token_file=None if token_file is None else Path(token_file),
            sessions=profile.concurrency,
            task_id=known.rows[0] if known.rows else None,
        )
    )
    known.served, known.verifier_s = server.tasks, server.verifier_s
    if server.sessions is not None and server.sessions < profile.concurrency:
        yield Problem(
            "environment",
            f"{profile.env_url} has {server.sessions} sessions for {profile.concurrency} episodes at once "
            "(rollout_batch_size × n_samples_per_prompt)",
            f"termrl serve --max-sessions {profile.concurrency}, or a smaller batch",
        )
    needed_mb = server.largest_mb * profile.concurrency
    if server.memory_mb is not None and server.memory_mb < needed_mb:
        yield Problem(
            "environment",
            f"{profile.env_url} has {server.memory_mb} MiB for tasks; {profile.concurrency} of the largest at once use "
            f"{needed_mb} MiB: episodes would wait for each other",
            f"termrl serve --max-memory-mb {needed_mb} on a machine that has it",
            warning=True,
        )
    if server.canonical is False:
        yield Problem(
            "environment",
            f"{profile.env_url} does not score by the tasks' own tests/test.sh",
            "termrl serve, or a server of OpenEnv's #1012 or later",
            warning=True,
        )


def check_tasks(known: Known) -> Iterator[Problem]:
    """Every task of the prompt file can be had, and is sound."""
    wanted = list(dict.fromkeys(known.rows))
    if known.served is not None and (missing := [name for name in wanted if name not in known.served]):
        yield Problem(
            "tasks",
            f"{len(missing)} of {len(wanted)} tasks of the prompt file cannot be had: {names(missing)}",
            "serve the folder that the rows were written from",
        )
    statuses: dict[str, Status] = {}
    for path in known.profile.preflight.validation:
        statuses |= {name: found.status for name, found in read_report(path).results.items()}
    if known.profile.preflight.validation:
        unsound = [
            f"{name} ({statuses.get(name, 'not validated')})"
            for name in wanted
            if statuses.get(name) is not Status.SOUND
        ]
        if unsound:
            yield Problem(
                "tasks",
                f"{len(unsound)} of {len(wanted)} tasks of the prompt file are not sound: {names(unsound)}",
                "leave them out of the rows: termrl tasks rows",
            )


def check_deadlines(known: Known) -> Iterator[Problem]:
    """What waits for something waits longer than that may take."""
    episodes = known.profile.episodes
    late = {
        name: s for name, s in known.verifier_s.items() if s >= episodes.message_timeout_s and name in set(known.rows)
    }
    if late:
        most = max(late.values())
        yield Problem(
            "deadlines",
            f"the tests of {len(late)} tasks may take up to {most:g} s, one answer of the environment "
            f"{episodes.message_timeout_s:g} s: {names(list(late))}",
            f"--set episodes.message_timeout_s={most + 300:g}",
        )
    ttl = episodes.sandbox_ttl_s
    if ttl is not None and ttl <= episodes.max_rollout_time_s:
        yield Problem(
            "deadlines",
            f"sandboxes end after {ttl:g} s, episodes may take {episodes.max_rollout_time_s:g} s and the tests more",
            "a longer TTL, or a smaller episodes.max_rollout_time_s",
        )


def check_faults(known: Known) -> Iterator[Problem]:
    """What faults cost, by what was measured."""
    settings = known.profile.preflight
    if settings.results is None:
        return
    path = settings.results / RESULTS if settings.results.is_dir() else settings.results
    counted = Counter(record.get("reward") is None for record in read_jsonl(path) if "task_id" in record)
    total = counted.total()
    rate = counted[True] / total if total else 0.0
    if not total:
        yield Problem("faults", f"{path}: no episodes in it", "results.jsonl of termrl eval")
    elif rate > settings.max_fault_rate:
        lost = 1 - (1 - rate) ** known.profile.rollout.n_samples_per_prompt
        yield Problem(
            "faults",
            f"{rate:.1%} of {total} measured episodes have no verdict: miles drops a whole group for one of them, "
            f"here {lost:.0%} of the groups",
            "find the causes first (termrl eval names them); fewer samples per prompt lose fewer groups",
            warning=True,
        )
