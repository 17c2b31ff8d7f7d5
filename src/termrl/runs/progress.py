"""Where a training run stands: everything that a checkpoint must bring back beside weights and optimiser."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from termrl.config import StopConfig
from termrl.rollout.curriculum import Curriculum
from termrl.rollout.groups import Batch
from termrl.runs.metrics import EvalScores, FamilyScore, RunTotals


@dataclass
class Progress:
    """Updated step by step by the loop.

    Attributes:
        step: training steps finished.
        totals: sums over them.
        rewards: mean reward by step (steps without a verdict have none).
        before, after: the evaluations; ``during`` those at steps between.
        no_verdict_steps, dead_steps, solved_steps: how many of the last steps in a row were such.
        no_verdict_said: what an episode was told that had no verdict, of the most frequent cause of the last step.
        curriculum: which levels are open, where there is a curriculum.
        stopped: why the run ended before its last step, if it did.
        evaluation_s, longest_step_s: wall seconds, for the time budget.
        engine_s: the engine's busy seconds at the last look (of this process).
        logs: the logs' sizes that belong to this state (:meth:`termrl.runs.store.RunStore.mark`).
        trained_logs: the same before the evaluation ``after``.
    """

    step: int = 0
    totals: RunTotals = field(default_factory=RunTotals)
    rewards: dict[int, float] = field(default_factory=dict)
    before: EvalScores | None = None
    after: EvalScores | None = None
    during: dict[int, EvalScores] = field(default_factory=dict)
    no_verdict_steps: int = 0
    no_verdict_said: str = ""
    dead_steps: int = 0
    solved_steps: int = 0
    curriculum: Curriculum | None = None
    stopped: str | None = None
    evaluation_s: float = 0.0
    longest_step_s: float = 0.0
    engine_s: float = 0.0
    logs: dict[str, int] | None = None
    trained_logs: dict[str, int] | None = None
    started: float = field(default_factory=time.monotonic)
    earlier_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Wall seconds of the run so far, those before a resume included."""
        return self.earlier_s + time.monotonic() - self.started

    def score(self, step: int) -> float | None:
        """Pass rate, in evaluations of trained families, of the weights after ``step``; ``None`` without one."""
        scores = self.after if step == self.step and self.after is not None else self.during.get(step)
        if scores is None and step == 0:
            scores = self.before
        return None if scores is None else scores.overall()

    def finish_step(self, step: int, metrics: Mapping[str, float], batch: Batch) -> None:
        """Count one finished step."""
        self.step = step
        self.totals.add(metrics, batch)
        reward = metrics.get("rollout/raw_reward")
        if reward is not None:
            self.rewards[step] = reward
        self.longest_step_s = max(self.longest_step_s, metrics["perf/step_s"])
        dead = not batch.samples
        solved = dead and metrics.get("rollout/pass_rate") == 1.0
        self.no_verdict_steps = self.no_verdict_steps + 1 if reward is None else 0
        self.no_verdict_said = next((batch.said.get(cause, "") for cause, _ in batch.dropped.most_common(1)), "")
        self.solved_steps = self.solved_steps + 1 if solved else 0
        self.dead_steps = self.dead_steps + 1 if dead and not solved else 0

    def moved_up(self) -> None:
        """A level opened: what was dead or solved before says nothing about the tasks to come."""
        self.dead_steps = self.solved_steps = 0

    def hopeless(self, stop: StopConfig) -> str | None:
        """Why nothing can be learnt, or ``None`` as long as something may be."""
        if self.no_verdict_steps >= stop.no_verdict_steps:
            causes = ", ".join(f"{count} {cause}" for cause, count in self.totals.dropped.most_common())
            said = f": {self.no_verdict_said}" if self.no_verdict_said else ""
            return f"no episode of the last {self.no_verdict_steps} steps got a verdict ({causes}){said}"
        if self.totals.commands_run == 0 and self.step >= stop.no_action_steps:
            return (
                f"not one of {self.totals.episodes} episodes ran a command: the model does not write the format that "
                "the opening shows"
            )
        if self.dead_steps >= stop.dead_steps:
            return (
                f"no group of the last {self.dead_steps} steps had both passes and failures, so there is no gradient: "
                "take easier tasks or more samples"
            )
        return None

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "step": self.step,
            "totals": self.totals.state(),
            "rewards": {str(step): reward for step, reward in self.rewards.items()},
            "before": _scores_state(self.before),
            "after": _scores_state(self.after),
            "during": {str(step): _scores_state(scores) for step, scores in self.during.items()},
            "no_verdict_steps": self.no_verdict_steps,
            "dead_steps": self.dead_steps,
            "solved_steps": self.solved_steps,
            "curriculum": self.curriculum.state() if self.curriculum is not None else None,
            "evaluation_s": self.evaluation_s,
            "longest_step_s": self.longest_step_s,
            "wall_s": self.wall_s,
            "logs": self.logs,
            "trained_logs": self.trained_logs,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """The opposite of :meth:`state`; the clock goes on from now."""
        return cls(
            step=state["step"],
            totals=RunTotals.from_state(state["totals"]),
            rewards={int(step): reward for step, reward in state["rewards"].items()},
            before=_scores_of(state["before"]),
            after=_scores_of(state["after"]),
            during={int(step): s for step, saved in state["during"].items() if (s := _scores_of(saved)) is not None},
            no_verdict_steps=state["no_verdict_steps"],
            dead_steps=state["dead_steps"],
            solved_steps=state["solved_steps"],
            curriculum=Curriculum.from_state(state["curriculum"]) if state.get("curriculum") is not None else None,
            evaluation_s=state["evaluation_s"],
            longest_step_s=state["longest_step_s"],
            earlier_s=state["wall_s"],
            logs=state["logs"],
            trained_logs=state["trained_logs"],
        )


def _scores_state(scores: EvalScores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    return {
        "families": {name: asdict(score) for name, score in scores.families.items()},
        "untrained": sorted(scores.untrained),
        "dropped": scores.dropped,
    }


def _scores_of(state: Mapping[str, Any] | None) -> EvalScores | None:
    if state is None:
        return None
    families = {name: FamilyScore(**score) for name, score in state["families"].items()}
    return EvalScores(families, frozenset(state["untrained"]), state["dropped"])
