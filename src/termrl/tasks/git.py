"""One version of a git repository in a folder: shallow, without hooks, prompts or programs that it asks to run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from termrl.errors import TaskError, TermrlError

_FULL = re.compile(r"[0-9a-f]{40}")
_SHORT = re.compile(r"[0-9a-f]{7,39}")
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_STALLED_S = 60
_STDERR_LINES = 4


def without_credentials(text: str) -> str:
    """``text`` with what stands before the @ of its addresses taken out."""
    return _USER_INFO.sub("", text)


def check_out(url: str, ref: str | None, into: Path, *, submodules: bool, timeout_s: float) -> str:
    """Put one version of the repository at ``url`` into the new folder ``into``.

    The user's git settings (proxies, credential helpers) hold for the connection, not for writing the files: nothing
    that a repository names is run, and files kept by Git LFS come as the pointers that they are.

    Args:
        url: https, http, ssh or file.
        ref: a commit, branch or tag; ``None`` for the default branch.
        submodules: bring submodules too.
        timeout_s: seconds for all of it.

    Returns:
        The commit, 40 hex digits.

    Raises:
        TaskError: there is no such version.
        TermrlError: git is missing or fails, or the time is over.
    """
    git = _Git(into, url, time.monotonic() + timeout_s)
    into.mkdir()
    git.run("init", "--quiet")
    commit = _fetch(git, url, ref)
    git.run("checkout", "--quiet", "--detach", commit, isolated=True)
    if submodules:
        git.run("submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1")
    return commit


def _fetch(git: _Git, url: str, ref: str | None) -> str:
    shallow = ("fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--depth", "1")
    try:
        git.run(*shallow, "--", url, ref or "HEAD")
        return git.run("rev-parse", "--verify", "FETCH_HEAD^{commit}").strip()
    except _GitFailed as error:
        if ref is None or not (_FULL.fullmatch(ref) or _SHORT.fullmatch(ref)):
            if "couldn't find remote ref" in error.message:
                raise TaskError(f"{without_credentials(url)}: has no branch, tag or commit {ref}") from None
            raise
    # not every server hands out single commits, and none finds one by the beginning of its name
    git.run("fetch", "--quiet", "--no-recurse-submodules", "--tags", "--", url, "+refs/heads/*:refs/remotes/origin/*")
    try:
        return git.run("rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}").strip()
    except _GitFailed:
        raise TaskError(f"{without_credentials(url)}: has no commit {ref} on any branch or tag") from None


class _GitFailed(TermrlError):
    """Git said no."""


class _Git:
    """Runs git in one work tree."""

    def __init__(self, folder: Path, url: str, deadline: float) -> None:
        self._folder = folder
        self._url = without_credentials(url)
        self._deadline = deadline

    def run(self, *arguments: str, isolated: bool = False) -> str:
        """Run git; its standard output. ``isolated`` leaves the user's and the system's settings out."""
        env = {
            **os.environ,
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file",
            "GIT_LFS_SKIP_SMUDGE": "1",
            "LC_ALL": "C",
        }
        env.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
            env.pop(name, None)
        if isolated:
            env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        settings = {
            "core.hooksPath": os.devnull,
            "core.symlinks": "true",
            "core.autocrlf": "false",
            "core.fsmonitor": "false",
            "http.lowSpeedLimit": "1000",
            "http.lowSpeedTime": str(_STALLED_S),
        }
        flags = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        left_s = self._deadline - time.monotonic()
        try:
            process = subprocess.Popen(
                ["git", *flags, *arguments],
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise TermrlError("git is not installed", hint="install git (Debian, Ubuntu: apt install git)") from None
        try:
            out, err = process.communicate(timeout=max(left_s, 0.001))
        except subprocess.TimeoutExpired:
            raise TermrlError(f"{self._url}: not fetched in time", hint="--timeout SECONDS gives it longer") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            lines = [line for line in without_credentials(err.decode(errors="replace")).splitlines() if line.strip()]
            said = "; ".join(lines[-_STDERR_LINES:]) or f"exit status {process.returncode}"
            raise _GitFailed(f"{self._url}: git {arguments[0]}: {said}")
        return out.decode(errors="replace")
