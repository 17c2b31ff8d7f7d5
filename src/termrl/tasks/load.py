"""Loading one Harbor folder into a :class:`~termrl.tasks.task.Task`, or saying what is wrong with it."""

from __future__ import annotations

import re
import warnings as python_warnings
from pathlib import Path, PurePosixPath

from termrl.errors import TaskError
from termrl.sandboxes.base import DEFAULT_WORKDIR, Healthcheck, ImageBuild, NetworkMode, SandboxSpec
from termrl.tasks.config import HealthcheckConfig, TaskConfig, parse_config, unsupported
from termrl.tasks.dockerfile import read_dockerfile
from termrl.tasks.folder import check_tree, entries, read_text
from termrl.tasks.ignore import IGNORE_FILE, excluded_paths
from termrl.tasks.seal import Seal
from termrl.tasks.task import Task

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_FETCHES = re.compile(r"(?<![\w./-])(?:[\w./]*/)?(curl|wget|apt|apt-get|pip3?|uv|uvx)(?![\w./-])")


def load_task(path: Path) -> Task:
    """Load, check and freeze one task folder.

    Raises:
        TaskError: the folder is no task, is broken, or asks for something that is not supported yet. Every bad
            field of its task.toml, or every unsupported feature, is named at once.
    """
    try:
        if not path.is_dir():
            raise TaskError(f"{path}: no such folder")
        return _load(path.resolve())
    except OSError as error:
        raise TaskError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None


def _load(path: Path) -> Task:
    toml = path / "task.toml"
    if not toml.is_file():
        raise TaskError(f"{path}: no task.toml", hint="a task is a folder with task.toml, instruction.md and tests/")
    check_tree(path)
    seal = Seal(path)
    config, warnings = parse_config(read_text(toml), str(toml))
    refused = [f"{toml}: {feature}" for feature in unsupported(config)] + _unsupported_files(path)
    if refused:
        raise TaskError("\n".join(refused))
    instruction = _instruction(path / "instruction.md")
    warnings += _check_tests(path)
    sandbox, more = _sandbox(path, config)
    warnings += more
    if config.artifacts:
        warnings.append(f"{toml}: artifacts: files are not kept after the episode")
    solution = path / "solution"
    return Task(
        id=sandbox.task_id,
        path=path,
        instruction=instruction,
        tests=path / "tests",
        solution=solution if (solution / "solve.sh").is_file() else None,
        sandbox=sandbox,
        verifier_timeout_s=config.verifier.timeout_sec,
        agent_timeout_s=config.agent.timeout_sec,
        verifier_env=dict(config.verifier.env),
        solution_env=dict(config.solution.env),
        tests_use_network=_tests_use_network(path / "tests" / "test.sh", sandbox.network_mode),
        metadata=dict(config.metadata),
        warnings=tuple(warnings),
        seal=seal,
    )


def cannot_pass(tests: Path) -> list[str]:
    """What in a task's ``tests/`` bash or Python cannot even read, each as ``file: why``."""
    found = []
    if b"\r\n" in (tests / "test.sh").read_bytes():
        found.append("test.sh: some lines have Windows line ends (CRLF): bash will not understand those")
    for name, file in entries(tests):
        if file.suffix == ".py" and file.is_file() and (line := _syntax_error(file)):
            found.append(f"{name}: {line}: tests that need it can never pass")
    return found


def strip_canary(text: str) -> str:
    """Drop leading comment lines that carry a benchmark canary, and the blank lines after them."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def _unsupported_files(path: Path) -> list[str]:
    found = {
        path / "environment" / "docker-compose.yaml": "compose environments: not supported yet",
        path / "steps": "multi-step tasks: not supported yet",
        path / "trajectory.json": "tasks that begin inside a conversation: not supported yet",
    }
    return [f"{file}: {why}" for file, why in found.items() if file.exists()]


def _instruction(file: Path) -> str:
    text = strip_canary(read_text(file)).strip("\n")
    if not text.strip():
        raise TaskError(f"{file}: empty")
    return text


def _check_tests(path: Path) -> list[str]:
    """Warnings about the tests; raises when there is nothing to run."""
    tests = path / "tests"
    script = tests / "test.sh"
    if not script.is_file():
        raise TaskError(f"{script}: missing")
    if "test.sh" in excluded_paths(tests):
        raise TaskError(f"{script}: left out by {IGNORE_FILE}")
    warnings = []
    raw = script.read_bytes()
    if not raw.strip():
        raise TaskError(f"{script}: empty")
    if _windows_script(raw):
        raise TaskError(
            f"{script}: has Windows line ends (CRLF): bash takes the carriage returns as part of each command",
            hint="convert it, for example: sed -i 's/\\r$//' test.sh",
        )
    warnings += [f"{tests}/{reason}" for reason in cannot_pass(tests)]
    solution = path / "solution" / "solve.sh"
    if solution.is_file() and _windows_script(solution.read_bytes()):
        warnings.append(f"{solution}: has Windows line ends (CRLF): the oracle will not run")
    if (path / IGNORE_FILE).exists():
        warnings.append(f"{path / IGNORE_FILE}: not used: only rules in tests/ and solution/ are")
    return warnings


def _windows_script(raw: bytes) -> bool:
    """Whether every line ends in CRLF (a script may well hold a few such lines as data)."""
    return b"\r\n" in raw and raw.count(b"\n") == raw.count(b"\r\n")


def _syntax_error(file: Path) -> str:
    try:
        with python_warnings.catch_warnings(action="ignore"):
            compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"SyntaxError at line {error.lineno}: {error.msg}"
    except ValueError as error:
        return f"not Python: {error}"
    return ""


def _sandbox(path: Path, config: TaskConfig) -> tuple[SandboxSpec, list[str]]:
    environment = path / "environment"
    settings = config.environment
    dockerfile = environment / "Dockerfile"
    host_userland = config.metadata.get("termrl_userland") == "host"
    warnings: list[str] = []
    workdir = likely_workdir = settings.workdir
    if dockerfile.is_file():
        if host_userland:
            raise TaskError(
                f"{path / 'task.toml'}: metadata.termrl_userland: 'host' and environment/Dockerfile exclude each other",
                hint="the Dockerfile's steps would not be run: put files into environment/ instead",
            )
        read = read_dockerfile(read_text(dockerfile), environment)
        likely_workdir = workdir or read.workdir
        problems = [f"{dockerfile}: COPY source {source} is missing" for source in read.missing]
        if problems and not settings.docker_image:
            raise TaskError("\n".join(problems))
        warnings += problems
    elif not settings.docker_image and not host_userland:
        raise TaskError(
            f"{path}: nothing says what the sandbox is made from",
            hint='give environment.docker_image, environment/Dockerfile, or [metadata] termrl_userland = "host"',
        )
    if workdir is None and host_userland:
        workdir = DEFAULT_WORKDIR
    warnings += _check_workdir(likely_workdir or DEFAULT_WORKDIR, path)
    build = None
    if dockerfile.is_file() and not settings.docker_image:
        build = ImageBuild(environment, settings.build_timeout_sec)
    # With a Dockerfile the files are in the image already.
    upload = not dockerfile.is_file() and environment.is_dir() and any(environment.iterdir())
    name = config.task.short_name if config.task else path.name
    return (
        SandboxSpec(
            task_id=name,
            workdir=workdir,
            image=settings.docker_image,
            build=build,
            host_userland=host_userland,
            files=environment if upload else None,
            env=dict(settings.env),
            memory_mb=settings.memory_mb,
            storage_mb=settings.storage_mb,
            cpus=settings.cpus,
            network_mode=settings.effective_network_mode,
            allowed_hosts=tuple(settings.allowed_hosts or ()),
            user=_user(config.agent.user),
            verifier_user=_user(config.verifier.user),
            healthcheck=_healthcheck(settings.healthcheck),
            gpus=settings.gpus or 0,
        ),
        warnings,
    )


def _user(value: str | int | None) -> str | None:
    return None if value is None else str(value)


def _healthcheck(config: HealthcheckConfig | None) -> Healthcheck | None:
    if config is None:
        return None
    return Healthcheck(
        command=config.command,
        interval_s=config.interval_sec,
        timeout_s=config.timeout_sec,
        start_period_s=config.start_period_sec,
        start_interval_s=config.start_interval_sec,
        retries=config.retries,
    )


def _check_workdir(workdir: str, path: Path) -> list[str]:
    parts = PurePosixPath(workdir).parts
    if parts[:2] in (("/", "tests"), ("/", "logs")):
        raise TaskError(f"{path}: the working directory {workdir} is where the verifier puts its own files")
    if parts[:2] == ("/", "solution"):
        return [f"{path}: the working directory {workdir} collides with where the oracle's solution is put"]
    return []


def _tests_use_network(script: Path, network_mode: NetworkMode) -> bool:
    """Whether test.sh seems to fetch something, so that its silence says nothing about the policy."""
    if network_mode == "no-network":
        return False
    text = script.read_bytes().decode(errors="replace")
    return any(_FETCHES.search(line.split("#", 1)[0]) for line in text.splitlines())
