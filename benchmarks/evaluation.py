"""SIGKILL at random moments of ``termrl eval`` over 64 bundled tasks, resumed each time: what differs from a whole one.

The command line's own process is killed. Compared with an evaluation that nobody killed: every attempt is there once,
its reward and end reason are the same, and so are the summary's totals. The policy is an endpoint on loopback that
gives a task's own solution or a wrong answer, by the request's seed; ``--bundled`` measures SmolLM2-135M instead, in
process, whose sampled tokens may differ in the last digit of a logit from one batch to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks._report import Figure, report  # noqa: E402
from termrl.runs.files import read_jsonl  # noqa: E402
from tests.evaluation.chat_server import DONE, MODEL, Answer, Call, bash, chat_server  # noqa: E402

_SOURCE = Path(__file__).resolve().parent.parent / "src"
_FAMILIES = "make-dir,make-two-dirs,remove-file,remove-dir,rename-file,copy-file,touch-file,write-word"
_PER_FAMILY = 8
_TURN_S = 0.02
_TIMES = ("seconds", "wall_s", "run_dir")


def _solver(tasks: Path) -> Callable[[Call], Answer]:
    """Answers with the task's own solution, or, for a third of all seeds, with nothing done."""
    solutions = {
        (task / "instruction.md").read_text().strip(): (task / "solution" / "solve.sh").read_text()
        for task in tasks.iterdir()
    }

    def answer(call: Call) -> Answer:
        time.sleep(_TURN_S)
        *_, (place, asked) = [
            (place, text)
            for place, message in enumerate(call.messages)
            for text in solutions
            if message["role"] == "user" and text in message["content"]
        ]
        began = any(message["role"] == "assistant" for message in call.messages[place:])
        return Answer(DONE if began or call.body["seed"] % 3 == 0 else bash(solutions[asked].strip()))

    return answer


def _start(run: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    begun = (run / "config.toml").exists()
    given = ["--resume", str(run)] if begun else [*arguments, "-o", str(run)]
    variables = {**os.environ, "PYTHONPATH": str(_SOURCE)}
    command = [sys.executable, "-m", "termrl", "eval", *given]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=variables)


def _finish(process: subprocess.Popen[bytes]) -> None:
    _, error = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the evaluation failed ({process.returncode}):\n{error.decode()}")


def _outcome(run: Path) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Every line, sorted, as what must be the same; and the summary without times."""
    keys = ("task_id", "sample", "seed", "reward", "end_reason", "tokens")
    lines = sorted(tuple(line[key] for key in keys) for line in read_jsonl(run / "results.jsonl"))
    summary = json.loads((run / "summary.json").read_text())
    return lines, {name: value for name, value in summary.items() if name not in _TIMES}


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """Kill and resume; then compare."""
    from termrl.tasks.generate import generate

    draw = random.Random(arguments.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="termrl-eval-")))
        generate(folder / "tasks", split="eval", families=_FAMILIES.split(","), per_family=_PER_FAMILY)
        given = [str(folder / "tasks"), "-k", str(arguments.samples)]
        if not arguments.bundled:
            server = stack.enter_context(chat_server(_solver(folder / "tasks")))
            given += ["--base-url", server.url, "-m", MODEL, "-n", "8"]
        started = time.monotonic()
        _finish(_start(folder / "whole", given))
        whole_s = time.monotonic() - started
        expected = _outcome(folder / "whole")

        run, kills, ended = folder / "killed", 0, False
        lost = differing = 0
        while kills < arguments.kills and not ended:
            process = _start(run, given)
            before = len(list(read_jsonl(run / "results.jsonl")))
            try:
                process.wait(draw.uniform(0.05, 0.6) * whole_s)
                ended = True
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            process.communicate()
            lost += max(0, before - len(list(read_jsonl(run / "results.jsonl"))))
            if ended and process.returncode != 0:
                raise SystemExit(f"it failed by itself ({process.returncode})")
            if ended and kills < arguments.kills:  # done before there were enough kills: once more from the start
                differing += _compare(expected, _outcome(run))
                run, ended = folder / f"killed-{kills}", False
        if not ended:
            _finish(_start(run, given))
        found = _outcome(run)
        twice = len(found[0]) - len({line[:2] for line in found[0]})
        differing += _compare(expected, found)
    wanted = len(expected[0])
    return [
        Figure("eval_tasks", expected[1]["tasks"], "tasks", "64", expected[1]["tasks"] == 64),
        Figure("eval_kills", kills, "SIGKILLs", f"≥ {arguments.kills}", kills >= arguments.kills),
        Figure("eval_attempts_recorded", len(found[0]), "attempts", str(wanted), len(found[0]) == wanted),
        Figure("eval_attempts_twice", twice, "attempts", "0", twice == 0),
        Figure("eval_attempts_forgotten", lost, "attempts", "0", lost == 0),
        Figure("eval_differences", differing, "attempts and totals", "0", differing == 0),
    ]


def _compare(expected: tuple[Any, Any], found: tuple[Any, Any]) -> int:
    """How many attempts and totals differ; each is printed."""
    lines = set(expected[0]) ^ set(found[0])
    totals = [name for name in expected[1] if expected[1][name] != found[1].get(name)]
    for what in [*sorted(lines, key=str), *totals]:
        print(f"differs: {what}", file=sys.stderr)
    return len({line[:2] for line in lines}) + len(totals)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bundled", action="store_true", help="measure the bundled model in process")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2, help="attempts at each task")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    report("termrl eval killed and resumed", measure(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
