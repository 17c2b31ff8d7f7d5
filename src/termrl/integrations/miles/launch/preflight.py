"""What is checked before anything costs a GPU hour: every problem at once, each with what to do about it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from termrl.errors import ConfigError, TermrlError
from termrl.integrations.miles.launch import node
from termrl.integrations.miles.launch.command import Plan
from termrl.integrations.miles.launch.environment import look_at_server
from termrl.integrations.miles.launch.flags import Flags
from termrl.integrations.miles.launch.profile import Profile
from termrl.integrations.miles.launch.rayjobs import RayJobs
from termrl.tasks.taskset import TaskSet
from termrl.validation.records import Status, read_report

KNOWN_MILES = ("0.1",)
HOSTED = ("daytona", "e2b", "agentenv", "modal")

_HINTS = {"environment": "termrl serve TASKS starts one, OPENENV_ENV_URL names it; termrl probe URL shows more"}
_NAMED = 5
_RAY_WAIT_S = 600.0
_FILES_PER_EPISODE = 8
_FILES_OF_MILES = 4096


@dataclass(frozen=True)
class Problem:
    """One finding. ``check`` is the name that ``--skip-preflight`` takes; a warning does not stop the launch."""

    check: str
    message: str
    hint: str = ""
    warning: bool = False


@dataclass
class Known:
    """What the checks share.

    Attributes:
        rows: task ids of the prompt file, as far as they could be read.
        verifier_s: verifier's budget of each task that an environment or a folder told of.
        served: tasks that can be had; ``None`` where that is not known.
    """

    profile: Profile
    plan: Plan
    run: Path
    environ: Mapping[str, str]
    facts: node.Facts | None = None
    rows: list[str] = field(default_factory=list)
    verifier_s: dict[str, float] = field(default_factory=dict)
    served: frozenset[str] | None = None


Check = Callable[[Known], Iterator[Problem]]


def preflight(
    profile: Profile, plan: Plan, run: Path, *, environ: Mapping[str, str], skip: Sequence[str] = ()
) -> list[Problem]:
    """Every problem of a launch, in the order of :data:`CHECKS`.

    Raises:
        ConfigError: ``skip`` names a check that there is none of.
    """
    if unknown := [name for name in skip if name not in CHECKS]:
        raise ConfigError(f"--skip-preflight {', '.join(unknown)}: no such check", hint=f"checks: {', '.join(CHECKS)}")
    known = Known(profile, plan, run, environ)
    found: list[Problem] = []
    for name, check in CHECKS.items():
        if name in skip:
            continue
        try:
            found.extend(check(known))
        except TermrlError as error:
            found.append(Problem(name, error.message, error.hint or _HINTS.get(name, "")))
    return found


def _sandbox(known: Known) -> Iterator[Problem]:
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


def _machine(known: Known) -> Iterator[Problem]:
    """One look at the machine, or the head of the cluster, that the other checks of it judge."""
    profile = known.profile
    wandb = profile.wandb.use_wandb and profile.wandb.wandb_mode not in ("offline", "disabled")
    netrc = profile.env.get("NETRC")
    files = [profile.paths.prompt_data, profile.episodes.token_file, profile.episodes.config, netrc]
    folders = [profile.paths.miles, profile.paths.megatron, profile.episodes.tasks_dir]
    wanted = node.Wanted(
        flags=[word for table in (profile.agent, profile.session) for word in _flags(table)],
        files=[str(name) for name in [*files, *folders] if name],
        disks=[str(known.run), profile.paths.models],
        programs=sorted({step.argv[0] for step in known.plan.steps}),
        variables=["WANDB_API_KEY"] if wandb else [],
        ray=profile.cluster.ray_address is not None,
        gpus=profile.cluster.gpus,
        wait_s=_RAY_WAIT_S,
    )
    output = _look(known, wanted)
    known.facts = node.found_in(output)
    if known.facts is None:
        last = output.strip().splitlines()[-1:] or ["it printed nothing"]
        yield Problem(
            "machine",
            f"{profile.paths.python} where miles runs cannot import termrl.integrations.miles: {last[0]}",
            "pip install 'termrl[miles]' into the environment of miles (paths.python)",
        )


def _look(known: Known, wanted: node.Wanted) -> str:
    profile, words = known.profile, node.arguments(wanted)
    if profile.cluster.ray_address is None:
        try:
            done = subprocess.run(
                [profile.paths.python, *words],
                env={**known.environ, **known.plan.env},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        except OSError as error:
            return f"paths.python {profile.paths.python}: {error.strerror}"
        except subprocess.TimeoutExpired:
            return "no answer in 120 s"
        return f"{done.stderr}\n{done.stdout}"
    import shlex

    jobs = RayJobs(profile.cluster.ray_address)
    job = jobs.submit("preflight", shlex.join([profile.paths.python, *words]), known.plan.env, run=known.run.name)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
        jobs.follow(job, nowhere)
    return jobs.logs(job)


def _miles(known: Known) -> Iterator[Problem]:
    facts, profile = known.facts, known.profile
    if facts is None:
        return
    if facts.miles is None:
        yield Problem(
            "miles",
            f"miles cannot be imported by {profile.paths.python}",
            "paths.miles is its checkout, or use the image of miles",
        )
        return
    if facts.missing or facts.unknown_flags:
        lacking = ", ".join([*facts.missing, *facts.unknown_flags])
        yield Problem(
            "miles",
            f"{facts.miles} lacks what it is driven by: {lacking}",
            "a checkout of August 2026 or later has all of it",
        )
    version = facts.miles_version
    if version is not None and not version.startswith(KNOWN_MILES):
        yield Problem(
            "miles",
            f"miles {version} is not one that was tried ({', '.join(KNOWN_MILES)}.x)",
            "watch the first rollout",
            warning=True,
        )
    tito = profile.session.tito_model
    if facts.tito and tito not in facts.tito:
        yield Problem(
            "miles",
            f"session.tito_model {tito}: this miles has {', '.join(facts.tito)}",
            "a newer miles, or another tito model",
        )
    for path, what in ((profile.paths.miles, "paths.miles"), (profile.paths.megatron, "paths.megatron")):
        if path in facts.unreadable:
            yield Problem("miles", f"{what} {path}: no such folder", f"--set {what}=FOLDER")
    if facts.no_programs:
        yield Problem(
            "miles",
            f"not found: {', '.join(facts.no_programs)}",
            "they come with miles' image (torch, huggingface_hub)",
        )


def _prompt_data(known: Known) -> Iterator[Problem]:
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


def _environment(known: Known) -> Iterator[Problem]:
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
    if server.canonical is False:
        yield Problem(
            "environment",
            f"{profile.env_url} does not score by the tasks' own tests/test.sh",
            "termrl serve, or a server of OpenEnv's #1012 or later",
            warning=True,
        )


def _tasks(known: Known) -> Iterator[Problem]:
    wanted = list(dict.fromkeys(known.rows))
    if known.served is not None and (missing := [name for name in wanted if name not in known.served]):
        yield Problem(
            "tasks",
            f"{len(missing)} of {len(wanted)} tasks of the prompt file cannot be had: {_names(missing)}",
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
                f"{len(unsound)} of {len(wanted)} tasks of the prompt file are not sound: {_names(unsound)}",
                "leave them out of the rows: termrl tasks rows",
            )


def _deadlines(known: Known) -> Iterator[Problem]:
    episodes = known.profile.episodes
    late = {
        name: s for name, s in known.verifier_s.items() if s >= episodes.message_timeout_s and name in set(known.rows)
    }
    if late:
        most = max(late.values())
        yield Problem(
            "deadlines",
            f"the tests of {len(late)} tasks may take up to {most:g} s, one answer of the environment "
            f"{episodes.message_timeout_s:g} s: {_names(list(late))}",
            f"--set episodes.message_timeout_s={most + 300:g}",
        )
    ttl = episodes.sandbox_ttl_s
    if ttl is not None and ttl <= episodes.max_rollout_time_s:
        yield Problem(
            "deadlines",
            f"sandboxes end after {ttl:g} s, episodes may take {episodes.max_rollout_time_s:g} s and the tests more",
            "a longer TTL, or a smaller episodes.max_rollout_time_s",
        )


def _credentials(known: Known) -> Iterator[Problem]:
    facts, profile = known.facts, known.profile
    if facts is None:
        return
    for path, key in (
        (profile.episodes.token_file, "episodes.token_file"),
        (profile.episodes.config, "episodes.config"),
    ):
        if path and path in facts.unreadable:
            yield Problem(
                "credentials",
                f"{key} {path}: missing, empty or unreadable where miles runs",
                "put it there on every machine, readable only by you",
            )
    netrc = profile.env.get("NETRC")
    if (
        "WANDB_API_KEY" in facts.unset
        and (not netrc or netrc in facts.unreadable)
        and not Path("~/.netrc").expanduser().is_file()
    ):
        yield Problem(
            "credentials",
            "W&B is on, but where miles runs there is neither WANDB_API_KEY nor a netrc file",
            "wandb login there, or --set env.NETRC=FILE, or --set wandb.wandb_mode=offline",
        )


def _open_files(known: Known) -> Iterator[Problem]:
    needed = _FILES_OF_MILES + _FILES_PER_EPISODE * known.profile.concurrency
    if known.facts is not None and known.facts.open_files < needed:
        yield Problem(
            "open-files",
            f"at most {known.facts.open_files} open files where miles runs, about {needed} are needed",
            f"ulimit -n {max(needed, 65536)}, before Ray starts",
        )


def _disk(known: Known) -> Iterator[Problem]:
    if known.facts is None:
        return
    needed = known.profile.preflight.disk_gb
    for path, free in known.facts.disk_gb.items():
        if free < needed:
            yield Problem(
                "disk",
                f"{path}: {free:.0f} GB free, {needed:g} GB are needed",
                "make room, another --run-dir or paths.models, or --set preflight.disk_gb=…",
            )


def _gpus(known: Known) -> Iterator[Problem]:
    cluster = known.profile.cluster
    nodes = cluster.nodes + cluster.rollout_nodes
    if cluster.ray_address is None and nodes > 1:
        yield Problem(
            "gpus",
            f"{nodes} nodes are asked for, but no Ray cluster",
            "--slurm writes a batch script that starts one, or --set cluster.ray_address=http://HEAD:8265",
        )
    elif known.facts is not None and known.facts.gpus < cluster.gpus:
        where = "this machine" if cluster.ray_address is None else f"the Ray cluster {cluster.ray_address}"
        yield Problem(
            "gpus",
            f"{where} has {known.facts.gpus} GPUs, {cluster.gpus} are asked for",
            "--set cluster.gpus_per_node=…, cluster.nodes=…",
        )


def _faults(known: Known) -> Iterator[Problem]:
    settings = known.profile.preflight
    if settings.results is None:
        return
    from termrl.runs.files import read_jsonl

    counted = Counter(record.get("reward") is None for record in read_jsonl(settings.results) if "task_id" in record)
    total = counted.total()
    rate = counted[True] / total if total else 0.0
    if not total:
        yield Problem("faults", f"{settings.results}: no episodes in it", "results.jsonl of termrl eval")
    elif rate > settings.max_fault_rate:
        lost = 1 - (1 - rate) ** known.profile.rollout.n_samples_per_prompt
        yield Problem(
            "faults",
            f"{rate:.1%} of {total} measured episodes have no verdict: miles drops a whole group for one of them, "
            f"here {lost:.0%} of the groups",
            "find the causes first (termrl eval names them); fewer samples per prompt lose fewer groups",
            warning=True,
        )


CHECKS: dict[str, Check] = {
    "sandbox": _sandbox,
    "machine": _machine,
    "miles": _miles,
    "prompt-data": _prompt_data,
    "environment": _environment,
    "tasks": _tasks,
    "deadlines": _deadlines,
    "credentials": _credentials,
    "open-files": _open_files,
    "disk": _disk,
    "gpus": _gpus,
    "faults": _faults,
}
"""The checks by name, in their order: later ones use what earlier ones found."""


def _flags(table: Flags) -> list[str]:
    return [word for word in table.argv() if word.startswith("--")]


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
