"""One attempt of an evaluation: its line in ``results.jsonl``, and what is read back of it.

A line is a complete episode as in a training run's ``episodes.jsonl`` (:mod:`termrl.runs.records`), with what reports
and ``termrl tasks rows`` need beside it: ``level``, ``difficulty``, ``category``, ``tags`` and ``digest`` of the task,
``seconds``, ``prompt_tokens`` and ``completion_tokens``. ``reward`` is 1, 0, or null where there is no verdict. Each
(``task_id``, ``sample``) has one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from termrl.agent.types import Episode
from termrl.rollout.groups import cause_of, sampled_tokens
from termrl.rollout.scheduler import Attempt
from termrl.runs.records import episode_record
from termrl.tasks.task import Task

Key = tuple[str, int]


@dataclass(frozen=True)
class Result:
    """What reports are made from. Attributes are those of the line; ``turns`` is their number, ``lost`` the causes of
    the attempts before the last."""

    task_id: str
    sample: int
    reward: float | None
    cause: str | None
    end_reason: str
    error: str
    family: str
    level: int | None
    difficulty: str
    category: str
    tags: tuple[str, ...]
    turns: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    lost: tuple[str, ...]

    @property
    def key(self) -> Key:
        """Which attempt it is."""
        return self.task_id, self.sample


def result_line(episode: Episode, attempt: Attempt, task: Task) -> dict[str, Any]:
    """The line of a finished attempt."""
    record = episode_record(
        episode, phase="eval", step=0, family=task.family, group=attempt.group, sample=attempt.sample
    )
    del record["phase"], record["step"], record["advantage"], record["trained"]
    sampled = sampled_tokens(episode) or sum(turn.completion_tokens or 0 for turn in episode.turns)
    tags = task.metadata.get("tags")
    return {
        **record,
        "cause": record["cause"] if episode.reward is not None else cause_of(episode),
        "tokens": sampled,
        "level": task.level,
        "difficulty": str(task.metadata.get("difficulty", "")),
        "category": str(task.metadata.get("category", "")),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list | tuple) else [],
        "digest": task.digest,
        "seconds": episode.timings.get("total_s", 0.0),
        "prompt_tokens": sum(turn.prompt_tokens or 0 for turn in episode.turns),
        "completion_tokens": sampled,
    }


def read_result(line: Mapping[str, Any]) -> Result:
    """The opposite of :func:`result_line`, as far as reports need it.

    Raises:
        KeyError, TypeError: not such a line.
    """
    reward = line["reward"]
    return Result(
        task_id=str(line["task_id"]),
        sample=int(line["sample"]),
        reward=None if reward is None else float(reward),
        cause=line["cause"],
        end_reason=str(line["end_reason"]),
        error=str(line.get("error", "")),
        family=str(line["family"]),
        level=line.get("level"),
        difficulty=str(line.get("difficulty", "")),
        category=str(line.get("category", "")),
        tags=tuple(line.get("tags", ())),
        turns=len(line["turns"]),
        prompt_tokens=int(line.get("prompt_tokens", 0)),
        completion_tokens=int(line.get("completion_tokens", 0)),
        seconds=float(line.get("seconds", 0.0)),
        lost=tuple(str(loss["cause"]) for loss in line.get("info", {}).get("lost", ())),
    )
