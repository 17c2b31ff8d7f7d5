"""``termrl eval``: how often a policy solves tasks, and how sure that is."""

from __future__ import annotations

import asyncio
import json as json_lines
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from termrl.cli.interrupts import INTERRUPTED, Interrupts
from termrl.cli.tokens import parts, split_tokens
from termrl.errors import ConfigError, HungError
from termrl.evaluation.config import EvalConfig
from termrl.settings import Loaded, given_toml, load_settings, to_toml

if TYPE_CHECKING:
    from termrl.evaluation.run import Prepared
    from termrl.evaluation.store import EvalStore
    from termrl.training.events import Watcher

SUITE = "first-steps"

_Flag = Annotated[str | None, Parameter(negative="")]
_Parts = Annotated[list[str] | None, Parameter(negative="")]


def evaluate(
    *tasks: Annotated[str, Parameter(allow_leading_hyphen=True)],
    base_url: _Flag = None,
    model: Annotated[str | None, Parameter(name=["-m", "--model"])] = None,
    samples: Annotated[str | None, Parameter(name=["-k", "--samples"])] = None,
    concurrency: Annotated[str | None, Parameter(name=["-n", "--concurrency"])] = None,
    sandbox: _Flag = None,
    env_url: _Flag = None,
    output: Annotated[str | None, Parameter(name=["-o", "--output", "--run-dir"])] = None,
    resume: Annotated[Path | None, Parameter(name="--resume")] = None,
    api_key_env: _Flag = None,
    api_key_file: _Flag = None,
    include: _Parts = None,
    exclude: _Parts = None,
    level: _Parts = None,
    families: _Parts = None,
    per_family: _Flag = None,
    split: _Flag = None,
    skip_broken: Annotated[bool, Parameter(negative="")] = False,
    track: _Flag = None,
    prometheus_port: _Flag = None,
    config: Annotated[tuple[Path, ...], Parameter(name=["--config", "-c"], negative="")] = (),
    json: Annotated[bool, Parameter(negative="")] = False,
    keys: Annotated[bool, Parameter(name="--keys", negative="")] = False,
) -> int:
    """Measure a model, a checkpoint or an API on terminal tasks: pass@1 to pass@k.

    Exit code 0 only if every attempt has a verdict. Settings come from defaults, then TOML files, then
    TERMRL_SECTION__KEY variables, then flags; those not listed here are given as --section.key VALUE.

    Parameters
    ----------
    tasks
        A folder of Harbor tasks, or first-steps, the bundled suite.
    base_url
        OpenAI-compatible endpoint of the policy, usually ending in /v1.
    model
        The endpoint's name for the model. Without an endpoint it runs here: the bundled model (default), a folder, a
        hub id, or the folder of a training run: RUN (newest checkpoint), RUN@best, RUN@STEP.
    samples
        Attempts at each task (1).
    concurrency
        Attempts at once, and calls to the endpoint at most (16).
    sandbox
        Where commands run: bubblewrap or docker.
    env_url
        OpenEnv server for the environments, instead of a sandbox here.
    output
        New folder for the results (runs/eval-…).
    resume
        Folder of an evaluation that stopped: makes only the attempts that are missing or have no verdict.
    api_key_env
        Variable that holds the key for --base-url; OPENAI_API_KEY is taken by itself for api.openai.com only.
    api_key_file
        File that holds the key for --base-url.
    include
        Only tasks whose name matches one of these globs; commas or repeats.
    exclude
        No tasks whose name matches one of these globs.
    level
        Only tasks of these levels.
    families
        Only tasks of these families.
    per_family
        How many tasks of each family of the bundled suite (8).
    split
        Which tasks of the bundled suite: eval (default), or train.
    skip_broken
        Leave broken task folders out.
    track
        Experiment tracker that also gets the figures: wandb, tensorboard, trackio or none.
    prometheus_port
        Serve the figures at http://127.0.0.1:PORT/metrics while it lasts.
    config
        TOML file; may be given several times, later ones win.
    json
        Print the summary as JSON instead of tables.
    keys
        List every setting with its default, and exit.
    """
    console = Console(stderr=json)
    if keys:
        from termrl.cli.train import show_keys

        show_keys(console, EvalConfig())
        return 0
    places, others = split_tokens(tasks)
    lists = {"include": include, "exclude": exclude, "levels": level, "families": families}
    given = {
        "policy.base_url": base_url,
        "policy.model": model,
        "policy.api_key_env": api_key_env,
        "policy.api_key_file": api_key_file,
        "samples": samples,
        "concurrency": concurrency,
        "run_dir": output,
        "sandbox.backend": sandbox,
        "environment.url": env_url,
        "tasks.per_family": per_family,
        "tasks.split": split,
        "tasks.skip_broken": "true" if skip_broken else None,
        "track.to": track,
        "track.prometheus_port": prometheus_port,
        **{f"tasks.{name}": _list(values) for name, values in lists.items()},
    }
    flags = [*others, *_places(places), *(f"--{key}={value}" for key, value in given.items() if value is not None)]
    if resume is not None:
        return _resume(console, resume, config, flags, json=json)
    loaded = _load(config, flags)
    if not places and loaded.config.tasks.dir is None and not any(key[0] == "tasks" for key in loaded.sources):
        raise ConfigError("no tasks given", hint=f"termrl eval FOLDER, or termrl eval {SUITE} for the bundled suite")
    from termrl.evaluation.store import EvalStore

    with _figures(loaded.config) as watchers:
        prepared = _prepare(loaded.config)
        run_dir = loaded.config.run_dir or Path("runs") / f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
        with EvalStore.begin(run_dir, given=given_toml(loaded), resolved=to_toml(loaded.config)) as store:
            return _run(console, loaded.config, store, watchers, prepared, resumed=False, json=json)


def _resume(console: Console, run: Path, files: Sequence[Path], flags: Sequence[str], *, json: bool) -> int:
    from termrl.evaluation.resume import resumed_config
    from termrl.evaluation.store import EvalStore

    _check_one_place({}, flags)
    with EvalStore.go_on(run) as store:
        config = resumed_config(run, files=files, environ=os.environ, flags=flags)
        with _figures(config) as watchers:
            return _run(console, config, store, watchers, _prepare(config), resumed=True, json=json)


def _load(files: Sequence[Path], flags: Sequence[str]) -> Loaded[EvalConfig]:
    """The settings; what stands for other defaults depends on the policy, which is a setting."""
    from termrl.evaluation.policies import presets

    first = load_settings(EvalConfig, files=files, environ=os.environ, flags=flags)
    _check_one_place(first.sources, flags)
    policy = presets(first.config.policy)
    return load_settings(EvalConfig, presets=policy, files=files, environ=os.environ, flags=flags)


def _check_one_place(sources: Mapping[tuple[str, ...], str], flags: Sequence[str]) -> None:
    """Refuse a sandbox beside an environment server: only one of them would run the commands."""
    named = {flag.partition("=")[0].removeprefix("--") for flag in flags} | {".".join(key) for key in sources}
    if {"environment.url", "sandbox.backend"} <= named:
        raise ConfigError(
            "--env-url and --sandbox: with a server the commands run where it does", hint="give one of them"
        )


def _places(places: Sequence[str]) -> list[str]:
    if len(places) > 1:
        raise ConfigError(f"one folder of tasks is expected, not {len(places)}: {', '.join(places)}")
    return [f"--tasks.dir={'none' if place == SUITE else place}" for place in places]


def _list(values: Sequence[str] | None) -> str | None:
    return json_lines.dumps(parts(values), ensure_ascii=False) if values else None


@contextmanager
def _figures(config: EvalConfig) -> Iterator[Sequence[Watcher]]:
    from termrl.runs.prometheus import serving
    from termrl.runs.trackers import check_tracker

    check_tracker(config.track.to)
    with serving(config.track) as watchers:
        yield watchers


def _prepare(config: EvalConfig) -> Prepared:
    from termrl.evaluation.run import prepare

    return prepare(config, _warn)


def _run(
    console: Console,
    config: EvalConfig,
    store: EvalStore,
    watchers: Sequence[Watcher],
    prepared: Prepared,
    *,
    resumed: bool,
    json: bool,
) -> int:
    """Evaluate to the end; Ctrl-C and SIGTERM close every sandbox, sweep, and give their own exit codes."""
    from termrl.cli.display import program_name
    from termrl.cli.evaldisplay import EvalDisplay, show
    from termrl.evaluation.run import evaluate as run_evaluation
    from termrl.runs.trackers import tracking
    from termrl.sandboxes.sweep import sweep
    from termrl.training.events import Together

    go_on = f"go on with: {program_name(sys.argv[0])} eval --resume {store.path}"
    state = config.sandbox.settings.get("state")
    state_folder = None if state is None else Path(state)
    summaries: list[dict[str, Any]] = []

    async def work() -> None:
        interrupts.attach()
        failed = True
        try:
            with EvalDisplay(Console(stderr=True), kept=len(store.results)) as display:
                watcher = Together([display, *watchers, *tracked])
                summaries.append(await run_evaluation(config, store, watcher, prepared=prepared, say=_warn))
            failed = False
        except HungError as error:
            # the thread that hangs would hold up every orderly end
            interrupts.end_now(error.exit_code, f"termrl: error: {error.message}\n  hint: {go_on}")
        finally:
            interrupts.detach(failed=failed)

    with (
        Interrupts(go_on, state=state_folder) as interrupts,
        tracking(config, store.path, resumed=resumed, warn=_warn) as tracked,
    ):
        try:
            asyncio.run(work())
        except (KeyboardInterrupt, asyncio.CancelledError):
            sweep(state_folder)
            print(f"\ninterrupted; {go_on}", file=sys.stderr)
            return interrupts.code or INTERRUPTED
    summary = summaries[0]
    if json:
        print(json_lines.dumps(summary, indent=2, ensure_ascii=False))
    else:
        show(console, summary)
    whole = not summary["no_verdict"] and not summary["not_made"]
    if not whole:
        print(go_on, file=sys.stderr)
    return 0 if whole else 1


def _warn(line: str) -> None:
    print(f"termrl: warning: {line}", file=sys.stderr)
