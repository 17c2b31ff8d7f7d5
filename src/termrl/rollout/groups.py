"""Groups: the episodes of one task that share a baseline, and what of them can be trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from termrl.agent.types import Episode
from termrl.training.advantages import DeadGroup, Sample, dead_group, group_advantages
from termrl.verifier.verdict import EndReason

TRUNCATED = frozenset({EndReason.LENGTH, EndReason.CONTEXT, EndReason.MAX_TURNS, EndReason.TIMEOUT})
"""End reasons where a limit cut the policy, rather than the policy ending by itself."""

UNKNOWN_CAUSE = "unknown"


@dataclass(frozen=True)
class Group:
    """The episodes of one task in one step. An episode without a verdict stays in it, with reward ``None``."""

    index: int
    task_id: str
    family: str
    episodes: tuple[Episode, ...]

    @property
    def rewards(self) -> list[float | None]:
        """One per episode, in sample order."""
        return [episode.reward for episode in self.episodes]

    @property
    def dead(self) -> DeadGroup | None:
        """Why the group teaches nothing, or ``None``."""
        return dead_group(self.rewards)


@dataclass
class Batch:
    """What one step trains on, and an account of everything that it does not.

    Attributes:
        samples: the episodes that are trained on, in (group, sample) order.
        trained: which those are, as (group, sample).
        advantages: of every episode, by (group, sample); ``None`` where there is no verdict.
        dropped: episodes without a verdict, by cause.
        said: for each of those causes, what one of its episodes was told.
        dead: groups left out, by reason.
        masked: sampled tokens left out of the loss, by reason.
    """

    samples: list[Sample] = field(default_factory=list)
    trained: set[tuple[int, int]] = field(default_factory=set)
    advantages: dict[tuple[int, int], float | None] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    said: dict[str, str] = field(default_factory=dict)
    dead: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)

    def skip(self, reason: str) -> None:
        """The update trained on none of the samples: their tokens are accounted for under ``reason``."""
        tokens = sum(segment.sampled for sample in self.samples for segment in sample.segments)
        left = tokens - self.masked["truncated"]
        if left:
            self.masked[reason] += left
        self.trained.clear()


def build_batch(
    groups: Sequence[Group], *, scale: Literal["none", "group"] = "none", mask_truncated: bool = False
) -> Batch:
    """Turn scored groups into samples.

    Episodes without a verdict leave their group's baseline; groups whose rewards are all equal and groups with
    fewer than two verdicts leave the batch. Both are counted, with the tokens that they take along. With
    ``mask_truncated`` an episode that a limit cut keeps its place in the baseline but its tokens carry no loss.
    """
    batch = Batch()
    for group in groups:
        dead = group.dead
        if dead is not None:
            batch.dead[dead] += 1
        advantages = group_advantages(group.rewards, scale=scale)
        for place, (episode, advantage) in enumerate(zip(group.episodes, advantages, strict=True)):
            batch.advantages[group.index, place] = advantage
            tokens = sampled_tokens(episode)
            truncated = episode.end_reason in TRUNCATED
            if advantage is None:
                cause = cause_of(episode)
                batch.dropped[cause] += 1
                batch.said[cause] = episode.verdict.detail if episode.verdict is not None else ""
                batch.masked["no_verdict"] += tokens
            elif dead is not None:
                batch.masked[dead] += tokens
            else:
                if truncated and mask_truncated:
                    batch.masked["truncated"] += tokens
                batch.trained.add((group.index, place))
                batch.samples.append(Sample(episode.segments, advantage, group.index, place, truncated))
    return batch


def cause_of(episode: Episode) -> str:
    """Why the episode has no reward, as a name of the closed list of causes."""
    if episode.verdict is not None and episode.verdict.cause is not None:
        return str(episode.verdict.cause)
    return UNKNOWN_CAUSE


def lost_attempts(episodes: Iterable[Episode]) -> Counter[str]:
    """How many attempts lost their environment and were played again, by cause."""
    return Counter(str(loss["cause"]) for episode in episodes for loss in episode.info.get("lost", ()))


def sampled_tokens(episode: Episode) -> int:
    """How many tokens the policy sampled in the episode."""
    return sum(segment.sampled for segment in episode.segments)
