"""The figures of one step, of one evaluation and of a whole run, by the names that trackers know them under."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from termrl.agent.types import Episode
from termrl.rollout.groups import Batch, Group, cause_of, lost_attempts, sampled_tokens
from termrl.verifier.metrics import verdict_metrics

_RETRIED = "rollout/episodes_retried/"
_COUNTERS = ("dropped", "retried", "masked")


@dataclass(frozen=True)
class FamilyScore:
    """How one task family did in one evaluation. ``pass_rate`` is over episodes with a verdict."""

    passed: int
    graded: int
    dropped: int = 0

    @property
    def pass_rate(self) -> float | None:
        """In [0, 1]; ``None`` when no episode got a verdict."""
        return self.passed / self.graded if self.graded else None


@dataclass(frozen=True)
class EvalScores:
    """One evaluation: each family's score, which of them are trained on, and pass@k where it was measured."""

    families: dict[str, FamilyScore]
    untrained: frozenset[str] = frozenset()
    dropped: dict[str, int] = field(default_factory=dict)
    pass_at: dict[int, float] = field(default_factory=dict)

    def overall(self, *, untrained: bool = False) -> float | None:
        """Pass rate over all episodes of the trained (or of the untrained) families."""
        scores = [score for name, score in self.families.items() if (name in self.untrained) == untrained]
        graded = sum(score.graded for score in scores)
        return sum(score.passed for score in scores) / graded if graded else None


def score_families(
    episodes: Sequence[Episode], families: Sequence[str], *, untrained: Iterable[str] = ()
) -> EvalScores:
    """Score an evaluation's episodes; ``families`` names each one's family."""
    counts: dict[str, list[int]] = {}
    dropped: Counter[str] = Counter()
    for episode, family in zip(episodes, families, strict=True):
        score = counts.setdefault(family, [0, 0, 0])
        if episode.reward is None:
            score[2] += 1
            dropped[cause_of(episode)] += 1
        else:
            score[0] += int(episode.reward >= 1.0)
            score[1] += 1
    scores = {family: FamilyScore(*counts[family]) for family in sorted(counts)}
    return EvalScores(scores, frozenset(untrained), dict(dropped))


@dataclass(frozen=True)
class Timings:
    """Wall seconds of one step. ``generation_s`` is the engine's busy time within ``rollout_s``."""

    step_s: float
    rollout_s: float
    generation_s: float
    train_s: float


def rollout_metrics(groups: Sequence[Group], batch: Batch, *, refilled: int = 0) -> dict[str, float]:
    """``rollout/*``: rewards over episodes with a verdict, counts over all of the step's episodes.

    ``refilled``: how many of the groups were played in place of others.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    metrics: dict[str, float] = {"rollout/episodes": len(episodes)}
    if rewards:
        metrics["rollout/raw_reward"] = sum(rewards) / len(rewards)
        metrics["rollout/pass_rate"] = sum(reward >= 1.0 for reward in rewards) / len(rewards)
    if episodes:
        metrics["rollout/turns"] = sum(len(episode.turns) for episode in episodes) / len(episodes)
        metrics["rollout/commands_run"] = sum(commands_run(episode) for episode in episodes)
    for cause, count in sorted(batch.dropped.items()):
        metrics[f"rollout/episodes_dropped/{cause}"] = count
    for cause, count in sorted(lost_attempts(episodes).items()):
        metrics[f"{_RETRIED}{cause}"] = count
    for reason, count in sorted(Counter(str(episode.end_reason) for episode in episodes).items()):
        metrics[f"rollout/end_reason/{reason}"] = count
    metrics |= verdict_metrics(episode.verdict for episode in episodes if episode.verdict is not None)
    metrics["rollout/zero_variance_groups"] = batch.dead["zero_variance"]
    metrics["rollout/refilled_groups"] = refilled
    metrics["rollout/single_valid_groups"] = batch.dead["one_valid"] + batch.dead["none_valid"]
    metrics["rollout/tokens_captured"] = sum(sampled_tokens(episode) for episode in episodes)
    metrics["rollout/tokens_masked"] = sum(batch.masked.values())
    return metrics


def capture_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Fidelity of the token record, summed over the sessions of the step's episodes."""
    counters = [episode.info.get("capture", {}) for episode in episodes]
    names = {"re_rendered_turns": "rollout/re_rendered_turns", "branches": "rollout/branches"}
    return {metric: sum(counter.get(name, 0) for counter in counters) for name, metric in names.items()}


def perf_metrics(timings: Timings, *, episodes: int, tokens: int) -> dict[str, float]:
    """``perf/*``: seconds, and rates over the step's wall time (``tokens``: those that the policy sampled)."""
    return {
        "perf/step_s": timings.step_s,
        "perf/generation_s": timings.generation_s,
        "perf/environment_s": max(0.0, timings.rollout_s - timings.generation_s),
        "perf/train_s": timings.train_s,
        "perf/episodes_per_s": episodes / timings.rollout_s if timings.rollout_s else 0.0,
        "perf/tokens_per_s": tokens / timings.generation_s if timings.generation_s else 0.0,
    }


def eval_metrics(scores: EvalScores) -> dict[str, float]:
    """``eval/pass_rate`` (trained families), ``eval/untrained_pass_rate``, one rate a family, ``eval/pass_at/<k>``."""
    rates = {
        "eval/pass_rate": scores.overall(),
        "eval/untrained_pass_rate": scores.overall(untrained=True),
        **{f"eval/family/{name}": score.pass_rate for name, score in scores.families.items()},
        **{f"eval/pass_at/{k}": value for k, value in scores.pass_at.items()},
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


def family_table(before: EvalScores | None, after: EvalScores | None) -> dict[str, dict[str, Any]]:
    """``eval_by_family`` of the summary: pass rates before and after, episodes, and whether it is trained on."""
    names = sorted({*(before.families if before else ()), *(after.families if after else ())})
    untrained = (before or after or EvalScores({})).untrained
    table: dict[str, dict[str, Any]] = {}
    for name in names:
        first = before.families.get(name) if before else None
        last = after.families.get(name) if after else None
        shown = last or first
        table[name] = {
            "before": first.pass_rate if first else None,
            "after": last.pass_rate if last else None,
            "episodes": shown.graded if shown else 0,
            "trained": name not in untrained,
        }
    return table


def commands_run(episode: Episode) -> int:
    """How many commands of the episode reached its sandbox."""
    return sum(turn.command is not None and turn.kind in ("command", "command_complete") for turn in episode.turns)


@dataclass
class RunTotals:
    """Sums over a run's training steps, kept step by step, so that a resumed run counts on."""

    steps: int = 0
    episodes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    tokens_captured: int = 0
    tokens_trained: int = 0
    re_rendered_turns: int = 0
    branches: int = 0
    logprob_diff: float = 0.0
    commands_run: int = 0

    def add(self, metrics: Mapping[str, float], batch: Batch) -> None:
        """Count one step. ``logprob_diff`` keeps the largest step's mean absolute difference."""
        self.steps += 1
        self.episodes += int(metrics["rollout/episodes"])
        self.dropped.update(batch.dropped)
        for name, value in metrics.items():
            if name.startswith(_RETRIED):
                self.retried[name.removeprefix(_RETRIED)] += int(value)
        self.masked.update(batch.masked)
        self.tokens_captured += int(metrics["rollout/tokens_captured"])
        self.tokens_trained += int(metrics.get("train/tokens", 0))
        self.re_rendered_turns += int(metrics.get("rollout/re_rendered_turns", 0))
        self.branches += int(metrics.get("rollout/branches", 0))
        self.commands_run += int(metrics.get("rollout/commands_run", 0))
        self.logprob_diff = max(self.logprob_diff, metrics.get("rollout/logprob_diff", 0.0))

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {**vars(self), **{name: dict(getattr(self, name)) for name in _COUNTERS}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunTotals:
        """The opposite of :meth:`state`."""
        return cls(**{**state, **{name: Counter(state.get(name, {})) for name in _COUNTERS}})
