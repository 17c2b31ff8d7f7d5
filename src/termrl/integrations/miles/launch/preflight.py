"""What is checked before anything costs a GPU hour: every problem at once, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from termrl.errors import ConfigError, TermrlError
from termrl.integrations.miles.launch import machine_checks, task_checks
from termrl.integrations.miles.launch.command import Plan
from termrl.integrations.miles.launch.findings import Known, Problem
from termrl.integrations.miles.launch.profile import Profile

Check = Callable[[Known], Iterator[Problem]]

CHECKS: dict[str, Check] = {
    "sandbox": task_checks.check_sandbox,
    "machine": machine_checks.check_machine,
    "miles": machine_checks.check_miles,
    "prompt-data": task_checks.check_prompt_data,
    "environment": task_checks.check_environment,
    "tasks": task_checks.check_tasks,
    "deadlines": task_checks.check_deadlines,
    "credentials": machine_checks.check_credentials,
    "open-files": machine_checks.check_open_files,
    "disk": machine_checks.check_disk,
    "gpus": machine_checks.check_gpus,
    "faults": task_checks.check_faults,
}
"""The checks by name, in their order: later ones use what earlier ones found."""

_HINTS = {"environment": "termrl serve TASKS starts one, OPENENV_ENV_URL names it; termrl probe URL shows more"}


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
