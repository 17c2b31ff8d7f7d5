"""A launch from end to end: the run folder, the steps, and the end of everything that was started."""

from __future__ import annotations

import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from termrl.errors import ConfigError, RunError
from termrl.integrations.miles.launch.command import TRACKER, Plan, Step
from termrl.integrations.miles.launch.process import Records, clean_up, run_command
from termrl.integrations.miles.launch.profile import Profile
from termrl.integrations.miles.launch.rayjobs import RayJobs
from termrl.integrations.miles.launch.secrets import MASK, held_secrets, masked
from termrl.runs.files import write_atomically
from termrl.settings import to_toml

PROFILE = "profile.toml"
SCRIPT = "launch.sh"
SUPERVISE = "termrl.integrations.miles.launch.supervise"

Say = Callable[[str], None]


def script(profile: Profile, plan: Plan, *, environ: Mapping[str, str]) -> str:
    """The launch as a script for bash, as it is run, with secrets masked."""
    address = profile.cluster.ray_address
    where = f"each a job of the Ray cluster {address}" if address else "on this machine"
    lines = [f"# {profile.model.name}: {len(plan.steps)} steps, {where}", "set -euo pipefail", ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(plan.env.items())]
    secrets = held_secrets(environ)
    if not address:
        lines += [f"# export {name}={MASK}  (inherited, never written)" for name in secrets]
    for step in plan.steps:
        lines += ["", f"# {step.name}", step.shell()]
    return masked("\n".join(lines) + "\n", secrets.values())


def prepare_folder(run: Path, profile: Profile, text: str, *, resume: bool) -> None:
    """Make the run folder and keep what it is launched from.

    Raises:
        RunError: it is in use, holds another run, has nothing to resume, or cannot be written.
    """
    checkpoint = run / "checkpoints" / TRACKER
    if resume and not checkpoint.is_file():
        raise RunError(
            f"{run}: no checkpoint to resume from ({checkpoint.name} is missing)", hint="launch it anew with --run-dir"
        )
    if Records(run).alive():
        raise RunError(f"{run}: processes of an earlier launch still run", hint=f"termrl launch stop {run}")
    if not resume and (run / PROFILE).exists() and checkpoint.exists():
        raise RunError(f"{run}: holds a run already", hint=f"--resume {run}, or another --run-dir")
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_atomically(run / PROFILE, to_toml(profile).encode())
        write_atomically(run / SCRIPT, text.encode())
    except OSError as error:
        raise RunError(f"{run}: cannot be written: {error.strerror}") from None


def launch(profile: Profile, plan: Plan, run: Path, *, environ: Mapping[str, str], say: Say) -> int:
    """Run every step; returns the exit code of the first that fails, else 0. Ends what it started, however it ends."""
    address = profile.cluster.ray_address
    jobs = None if address is None else RayJobs(address)
    for step in plan.steps:
        if jobs is None and step.unless is not None and Path(step.unless).exists():
            say(f"{step.name}: left out, {step.unless} is there")
            continue
        say(f"{step.name}: begins; log: {run / 'logs' / f'{step.name}.log'}")
        code = (
            _run(step, plan, run, environ)
            if jobs is None
            else _submit(jobs, step, plan, run, say, python=profile.paths.python)
        )
        if code:
            say(f"{step.name}: ended with code {code}")
            return code
    return 0


def stop(run: Path, *, say: Say) -> int:
    """End what is left of a launch: its Ray jobs and its processes on this machine; returns how many there were."""
    records = Records(run)
    if not records.path.exists():
        raise ConfigError(f"{run}: nothing was launched from here ({records.path.name} is missing)")
    stopped = 0
    for job, address in records.jobs():
        if RayJobs(address).stop(job):
            say(f"Ray job {job} is stopped")
            stopped += 1
    ended = clean_up(run)
    say(f"{ended} processes were ended")
    return stopped + ended


def _run(step: Step, plan: Plan, run: Path, environ: Mapping[str, str]) -> int:
    env = {**environ, **plan.env}
    words: list[str] = []
    try:
        if step.model_args:
            asked = subprocess.run(step.model_args, cwd=step.cwd, env=env, capture_output=True, text=True, check=False)
            if asked.returncode:
                said = (asked.stderr.strip() or "it says nothing").splitlines()[-1]
                raise RunError(
                    f"{step.name}: {shlex.join(step.model_args)}: {said}",
                    hint="model.megatron_model_type is a file of miles' scripts/models",
                )
            words = asked.stdout.split()
        code = run_command(step.words(words), step=step.name, cwd=step.cwd, env=env, run=run)
        return code if code >= 0 else 128 - code
    except OSError as error:
        raise RunError(f"{step.name}: {error.filename}: {error.strerror}") from None


def _submit(jobs: RayJobs, step: Step, plan: Plan, run: Path, say: Say, *, python: str) -> int:
    job = f"termrl-{run.name}-{step.name}-{uuid.uuid4().hex[:8]}"
    Records(run).add_job(step.name, job, jobs.address)
    log = run / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        jobs.submit(job, [python, "-m", SUPERVISE, "bash", "-c", step.shell()], plan.env)
        say(f"{step.name}: Ray job {job}")
        status = jobs.follow(job, sys.stdout.buffer)
    except BaseException:
        jobs.stop(job)
        raise
    log.write_text(jobs.logs(job), encoding="utf-8")
    return 0 if status == "SUCCEEDED" else 1
