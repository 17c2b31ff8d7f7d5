"""The environment that a task's tests run in."""

from __future__ import annotations

import secrets

from termrl.sandboxes.base import DEFAULT_WORKDIR, SandboxSpec
from termrl.tasks.env import resolve_env
from termrl.tasks.task import Task
from termrl.verifier.tamper import Changes

LOGS = "/logs/verifier"

_UNTRUSTED_ROOTS = ("/root", "/home", "/tmp", "/var/tmp", "/dev", "/run", "/proc")


def verifier_variables(task: Task) -> dict[str, str]:
    """``[verifier] env`` filled from the host.

    Raises:
        TaskError: it names a host variable that is not set.
    """
    return resolve_env(task.verifier_env, f"{task.path}/task.toml: verifier.env")


def verifier_environment(spec: SandboxSpec, task: Task, changes: Changes | None = None) -> dict[str, str]:
    """Over the backend's fixed base: the image's and the task's variables, the verifier's, and a fresh ``HOME``.

    Folders of PATH that ``changes`` shows as touched come after all others.
    """
    env = dict(spec.env)
    path = env.get("PATH") or (changes.search_path if changes is not None else "")
    if path:
        env["PATH"] = trusted_path(path, spec.workdir or DEFAULT_WORKDIR, changes)
    env.update(verifier_variables(task))
    env["HOME"] = f"/tmp/termrl-verifier-{secrets.token_hex(8)}"
    return env


def trusted_path(path: str, workdir: str, changes: Changes | None = None) -> str:
    """``path`` with the folders that any user writes to (homes, temp folders, ``workdir``) moved to its end.

    So are those in which ``changes`` shows something new. Relative and empty elements, which mean the current
    directory, are dropped. Order is kept otherwise.
    """
    roots = (*_UNTRUSTED_ROOTS, workdir.rstrip("/") or "/")
    folders = [folder for folder in path.split(":") if folder.startswith("/")]
    touched = changes.demoted(folders) if changes is not None else frozenset()

    def is_trusted(folder: str) -> bool:
        if folder in touched:
            return False
        return not any(folder == root or folder.startswith(root.rstrip("/") + "/") for root in roots if root != "/")

    return ":".join([*filter(is_trusted, folders), *(folder for folder in folders if not is_trusted(folder))])
