"""The command line, one module per verb, each imported only when it is called.

A verb is a function or a cyclopts app; it returns an exit code (``None`` is 0) and raises
:class:`~termrl.errors.TermrlError` for what the user has to know. :func:`main` prints message and hint, never a
traceback unless ``--debug`` is given.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from termrl import __version__
from termrl.errors import ConfigError, TermrlError

INTERRUPTED = 130
BAD_USAGE = 2

_VERBS = {
    "train": ("termrl.cli.train:train", "Train a model on terminal tasks by GRPO."),
    "eval": ("termrl.cli.eval:evaluate", "Measure a model, a checkpoint or an API on terminal tasks: pass@k."),
    "serve": ("termrl.cli.serve:serve", "Serve tasks to OpenEnv clients."),
    "tasks": ("termrl.cli.tasks:app", "Fetch, generate, list, show and lock tasks."),
    "validate": ("termrl.cli.validate:validate", "Show that tasks are sound: oracle scores 1, doing nothing 0."),
    "launch": ("termrl.cli.launch:app", "Launch training with miles on GPUs."),
    "attack": ("termrl.cli.attack:attack", "Attack tasks as a dishonest policy would, and print what got through."),
    "export": ("termrl.cli.export:export", "Write a run's model as a stand-alone folder or adapter."),
    "probe": ("termrl.cli.probe:app", "Smoke-test an OpenEnv server."),
    "doctor": ("termrl.cli.doctor:app", "Check this machine and say how to fix what is missing."),
    "sweep": ("termrl.cli.sweep:app", "Remove what killed processes left behind."),
}


def build_app() -> App:
    """The command-line app with every verb mounted lazily."""
    app = App(
        name="termrl",
        version=__version__,
        help="Train language models by reinforcement learning on real terminal tasks.",
        help_epilogue="--debug shows tracebacks. Each verb has its own --help.",
        result_action="return_value",
    )
    for name, (target, text) in _VERBS.items():
        app.command(target, name=name, help=text)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    tokens = list(argv)
    debug = "--debug" in tokens
    if debug:
        tokens.remove("--debug")
    try:
        _check_verb(tokens)
        result = build_app()(tokens, exit_on_error=False, print_error=False)
        return result if isinstance(result, int) else 0
    except TermrlError as error:
        if debug:
            raise
        _complain(error.message, error.hint)
        return error.exit_code
    except CycloptsError as error:
        if debug:
            raise
        _complain(str(error), "termrl --help lists verbs and options")
        return BAD_USAGE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        _complain("interrupted", None)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if debug:
            raise
        _complain(f"unexpected {type(error).__name__}: {error}", "run again with --debug for the traceback")
        return 1


def _check_verb(tokens: Sequence[str]) -> None:
    """Refuse an unknown verb here: cyclopts would import every verb to word its own message."""
    if tokens and not tokens[0].startswith("-") and tokens[0] not in _VERBS:
        close = difflib.get_close_matches(tokens[0], list(_VERBS), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"unknown command {tokens[0]}{meant}", hint=f"commands: {', '.join(sorted(_VERBS))}")


def _complain(message: str, hint: str | None) -> None:
    lines = message.splitlines() or [""]
    print(f"termrl: error: {lines[0]}", file=sys.stderr)
    for line in lines[1:]:
        print(f"               {line}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)


__all__ = ["build_app", "main", "run"]
