"""``termrl launch``: start miles from a profile, look at what would be run, end what is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from termrl.errors import ConfigError, TermrlError

if TYPE_CHECKING:
    from termrl.integrations.miles.launch.preflight import Problem

app = App(name="launch", help="Launch training on a cluster.")

_Bare = Annotated[bool, Parameter(negative="")]


@app.command
def miles(
    profile: str | None = None,
    /,
    *extra: str,
    run_dir: Path | None = None,
    dry_run: _Bare = False,
    check: _Bare = False,
    mode: Literal["train", "rollout-only"] = "train",
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    config: Annotated[tuple[Path, ...], Parameter(name=["--config", "-c"], negative="")] = (),
    resume: Path | None = None,
    slurm: _Bare = False,
    skip_preflight: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> int:
    """Launch miles: check everything, convert the checkpoint on a first run, train; docs/miles.md is the how-to.

    Where the profile names a Ray cluster the steps are jobs there; else they run on this machine. Ctrl-C ends
    everything that was started, and nothing else.

    Parameters
    ----------
    profile
        glm-4.7-flash, deepseek-v4-flash, glm-5.2, qwen3-8b, or a TOML file.
    extra
        Behind --: flags of miles that come last on its command line.
    run_dir
        Where checkpoints, dumps and logs go; the same path on every machine.
    dry_run
        Print the exact commands and variables, secrets masked, and end.
    check
        Check everything, and end.
    mode
        rollout-only samples and does not train.
    set_
        Any setting of the profile, as key=value; may be given several times.
    config
        TOML file over the profile; may be given several times, later ones win.
    resume
        Go on from the last checkpoint of a run folder, with its settings.
    slurm
        Write the batch script that starts Ray and this launch on several nodes, and end.
    skip_preflight
        A check to leave out; may be given several times.
    """
    from termrl.integrations.miles.launch import launching
    from termrl.integrations.miles.launch.command import build
    from termrl.integrations.miles.launch.preflight import preflight
    from termrl.integrations.miles.launch.process import ending_on_signals
    from termrl.integrations.miles.launch.profile import load_profile, profile_names
    from termrl.integrations.miles.launch.slurm import batch_script

    if profile is not None and profile.startswith("-"):
        profile, extra = None, (profile, *extra)
    name = str(resume / launching.PROFILE) if resume is not None and profile is None else profile
    if name is None:
        raise ConfigError(
            "no profile is named",
            hint=f"termrl launch miles {profile_names()[0]} (or {', '.join(profile_names()[1:])})",
        )
    if extra and not extra[0].startswith("-"):
        raise ConfigError(f"unexpected {extra[0]}", hint="flags of miles go behind --, settings are --set key=value")
    loaded = load_profile(name, files=config, environ=os.environ, settings=set_)
    loaded = loaded.model_copy(update={"extra": (*loaded.extra, *extra)})
    run = (resume or run_dir or Path("runs") / f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    plan = build(loaded, run, mode=mode, resume=resume is not None)
    text = launching.script(loaded, plan, environ=os.environ)
    if slurm:
        begun = [str(run / launching.PROFILE), "--run-dir", str(run)] if resume is None else ["--resume", str(run)]
        again = ["termrl", "launch", "miles", *begun, "--mode", mode]
        again += [word for check_name in skip_preflight for word in ("--skip-preflight", check_name)]
        text = batch_script(loaded, run, again)
    if dry_run:
        sys.stdout.write(text)
        return 0
    if slurm:
        launching.prepare_folder(run, loaded, text, resume=resume is not None)
        print(f"sbatch {run / launching.SCRIPT}")
        return 0
    with ending_on_signals():
        problems = preflight(loaded, plan, run, environ=os.environ, skip=skip_preflight)
        _report(problems)
        if any(not problem.warning for problem in problems):
            raise TermrlError("nothing was started", hint="mend the above, or --skip-preflight CHECK")
        if check:
            print("termrl launch: all checks hold")
            return 0
        launching.prepare_folder(run, loaded, text, resume=resume is not None)
        _say(f"run folder {run}")
        return launching.launch(loaded, plan, run, environ=os.environ, say=_say)


@app.command
def stop(run: Path, /) -> int:
    """End what is left of a launch: the Ray jobs and, on this machine, the processes that its folder records.

    Parameters
    ----------
    run
        The run folder.
    """
    from termrl.integrations.miles.launch import launching

    launching.stop(run.absolute(), say=_say)
    return 0


def _report(problems: Sequence[Problem]) -> None:
    for problem in problems:
        kind = "warning" if problem.warning else "error"
        print(f"termrl launch: {kind}: {problem.check}: {problem.message}", file=sys.stderr)
        if problem.hint:
            print(f"  hint: {problem.hint}", file=sys.stderr)


def _say(line: str) -> None:
    print(f"termrl launch: {line}", file=sys.stderr, flush=True)
