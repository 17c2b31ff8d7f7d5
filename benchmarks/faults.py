"""A training run with 20 % injected infrastructure faults, against the same run without them.

Sandboxes that do not start, sandboxes killed in mid-episode, tests that crash. None of it may be rewarded, each must
be counted under its cause, also where the episode is played again, and the run must learn as it does without. The
model is a tiny random one whose vocabulary holds whole commands; ``--bundled`` trains SmolLM2-135M on first-steps.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks._report import Figure, report  # noqa: E402
from termrl.config import TrainConfig  # noqa: E402
from termrl.runs.files import read_jsonl  # noqa: E402
from termrl.runs.store import RunStore  # noqa: E402
from termrl.sandboxes import SandboxProvider, open_provider  # noqa: E402
from termrl.settings import load_settings, to_toml  # noqa: E402
from termrl.training.events import Silent  # noqa: E402
from termrl.training.local import prepare, train  # noqa: E402
from tests.endtoend.faults import FaultyProvider, faulty  # noqa: E402
from tests.endtoend.tiny import write_model, write_tasks  # noqa: E402

_LAST_STEPS = 3
_HELD_OUT = 32
_TINY = {
    "model.threads": 1,
    "rollout.groups": 1,
    "rollout.samples": 24,
    "episode.max_turns": 2,
    "episode.max_tokens": 4,
    "training.lr": 0.005,
    "training.warmup_steps": 0,
    "steps": 12,
}


def _settings(folder: Path, arguments: argparse.Namespace) -> list[str]:
    if arguments.bundled:
        settings: dict[str, object] = {"steps": arguments.steps or 15}
    else:
        write_model(folder / "model")
        write_tasks(folder / "train", ("apple",))
        for take in range(_HELD_OUT):
            write_tasks(folder / "held-out", ("apple",), prefix=f"eval-{take}")
        settings = {
            **_TINY,
            "model.path": folder / "model",
            "tasks.dir": folder / "train",
            "evaluation.dir": folder / "held-out",
        }
        if arguments.steps:
            settings["steps"] = arguments.steps
    return [f"--{key}={value}" for key, value in settings.items()]


def _train(run: Path, flags: list[str], open_sandboxes: Callable[..., SandboxProvider]) -> dict[str, Any]:
    config = load_settings(TrainConfig, flags=flags).config
    model, pools = prepare(config)
    with RunStore.create(run, given="", resolved=to_toml(config)) as store:
        work = train(config, store, Silent(), model=model, pools=pools, open_sandboxes=open_sandboxes)
        return asyncio.run(work)


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """Run both and compare."""
    made: list[FaultyProvider] = []
    with tempfile.TemporaryDirectory(prefix="termrl-faults-") as name:
        folder = Path(name)
        flags = _settings(folder, arguments)
        plain = _train(folder / "plain", flags, open_provider)
        hurt = _train(folder / "hurt", flags, faulty(arguments.rate, arguments.seed, made))
        episodes = list(read_jsonl(folder / "hurt" / "episodes.jsonl"))
    injected = Counter({str(cause): count for cause, count in made[0].injected.items()})
    counted = Counter(episode["cause"] for episode in episodes if episode["reward"] is None)
    counted.update(loss["cause"] for episode in episodes for loss in episode["info"].get("lost", ()))
    total = injected.total()
    miscounted = sum(abs(injected[cause] - counted[cause]) for cause in {*injected, *counted})
    rewarded = sum(
        episode["reward"] is not None or episode["trained"] for episode in episodes if episode["cause"] in injected
    )
    share = total / len(episodes)
    before, after = (sum(summary["rewards"][-_LAST_STEPS:]) / _LAST_STEPS for summary in (plain, hurt))
    figures = [
        Figure(f"injected_{cause}", count, "episodes", "counted", counted[cause] == count)
        for cause, count in sorted(injected.items())
    ]
    return [
        *figures,
        Figure("faults_share", share, "of episodes", "about 0.2", 0.1 < share < 0.3),
        Figure("faults_miscounted", miscounted, "episodes", "0", miscounted == 0),
        Figure("faults_rewarded", rewarded, "episodes", "0", rewarded == 0),
        Figure(
            "reward_with_faults", after, "last 3 steps", "≥ peer − 0.1", after >= before - 0.1, before, after / before
        ),
        Figure(
            "pass_rate_with_faults",
            hurt["eval_after"],
            "held out",
            "≥ peer − 0.1",
            hurt["eval_after"] >= plain["eval_after"] - 0.1,
            plain["eval_after"],
            hurt["eval_after"] / max(plain["eval_after"], 1e-9),
        ),
    ]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bundled", action="store_true", help="train the bundled model on first-steps")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--rate", type=float, default=0.2, help="share of sandboxes with a fault")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    arguments = parser.parse_args()
    report("Infrastructure faults", measure(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
