"""Checks of the machines that train: what is installed, readable, free and enough."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from termrl.integrations.miles.launch import node
from termrl.integrations.miles.launch.findings import Known, Problem
from termrl.integrations.miles.launch.flags import Flags
from termrl.integrations.miles.launch.rayjobs import RayJobs

KNOWN_MILES = ("0.1",)

_LOOK_S = 120.0
_RAY_WAIT_S = 600.0
_FILES_PER_EPISODE = 8
_FILES_OF_MILES = 4096


def check_machine(known: Known) -> Iterator[Problem]:
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
                timeout=_LOOK_S,
                check=False,
            )
        except OSError as error:
            return f"paths.python {profile.paths.python}: {error.strerror}"
        except subprocess.TimeoutExpired:
            return f"no answer in {_LOOK_S:g} s"
        return f"{done.stderr}\n{done.stdout}"
    jobs = RayJobs(profile.cluster.ray_address)
    job = f"termrl-{known.run.name}-preflight-{uuid.uuid4().hex[:8]}"
    try:
        jobs.submit(job, [profile.paths.python, *words], known.plan.env)
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
            jobs.follow(job, nowhere)
        return jobs.logs(job)
    finally:
        jobs.stop(job)


def check_miles(known: Known) -> Iterator[Problem]:
    """miles is there, is one that was tried, and has what it is driven by."""
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


def check_credentials(known: Known) -> Iterator[Problem]:
    """Credentials are where they are looked for."""
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


def check_open_files(known: Known) -> Iterator[Problem]:
    """Episodes need sockets."""
    needed = _FILES_OF_MILES + _FILES_PER_EPISODE * known.profile.concurrency
    if known.facts is not None and known.facts.open_files < needed:
        yield Problem(
            "open-files",
            f"at most {known.facts.open_files} open files where miles runs, about {needed} are needed",
            f"ulimit -n {max(needed, 65536)}, before Ray starts",
        )


def check_disk(known: Known) -> Iterator[Problem]:
    """Checkpoints and dumps need room."""
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


def check_gpus(known: Known) -> Iterator[Problem]:
    """All GPUs are there."""
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


def _flags(table: Flags) -> list[str]:
    return [word for word in table.argv() if word.startswith("--")]
