"""Which tasks a step trains on: families in turn, each family's tasks in a seeded order without repeats.

With a curriculum the families of the lowest level come first, and those of the next one join them once the highest
open level is passed often enough. What is open is part of a run's progress, so that a resumed run goes on alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from termrl.config import CurriculumConfig
from termrl.errors import TaskError
from termrl.rollout.groups import Group
from termrl.rollout.seeds import derive_seed
from termrl.tasks.task import Task

_DRAWS = 4  # candidates for each refill; more only matters where nearly all tasks are in the step already


@dataclass(frozen=True)
class Stage:
    """Families that are trained on from a step (counted from 1) until the next stage begins."""

    first_step: int
    families: tuple[str, ...]


@dataclass
class Curriculum:
    """Which levels are open.

    Attributes:
        opened: level → the first step that trains on it.
        recent: (passed, graded) episodes of the highest open level, one pair for each of the last ``window`` steps
            that met it since it opened.
    """

    opened: dict[int, int]
    recent: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def begin(cls, levels: Mapping[str, int]) -> Curriculum:
        """Only the lowest of the families' ``levels`` is open."""
        return cls({min(levels.values()): 1})

    @property
    def level(self) -> int:
        """The highest open level."""
        return max(self.opened)

    def next_level(self, levels: Mapping[str, int]) -> int | None:
        """The level that opens next, or ``None`` when all are open."""
        return min((level for level in levels.values() if level > self.level), default=None)

    def stages(self, levels: Mapping[str, int]) -> list[Stage]:
        """What is trained on from when, as :func:`pick_tasks` takes it."""
        return [
            Stage(step, tuple(sorted(name for name, level in levels.items() if level <= highest)))
            for highest, step in sorted(self.opened.items())
        ]

    def finish_step(
        self, step: int, groups: Sequence[Group], levels: Mapping[str, int], config: CurriculumConfig
    ) -> bool:
        """Count a finished step's episodes of the highest open level; whether that opened the next one.

        Episodes without a verdict do not count, nor does a step in which none of that level has one.
        """
        following = self.next_level(levels)
        rewards = [reward for group in groups if levels[group.family] == self.level for reward in group.rewards]
        graded = [reward for reward in rewards if reward is not None]
        if following is None or not graded:
            return False
        self.recent = [*self.recent, (sum(reward >= 1.0 for reward in graded), len(graded))][-config.window :]
        passed, seen = (sum(counts) for counts in zip(*self.recent, strict=True))
        if len(self.recent) < config.window or passed / seen < config.threshold:
            return False
        self.opened[following] = step + 1
        self.recent = []
        return True

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {
            "opened": {str(level): step for level, step in self.opened.items()},
            "recent": [list(counts) for counts in self.recent],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Curriculum:
        """The opposite of :meth:`state`."""
        opened = {int(level): int(step) for level, step in state["opened"].items()}
        return cls(opened, [(int(passed), int(graded)) for passed, graded in state["recent"]])


def by_family(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Tasks by family, families and tasks in the order of their names."""
    families: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda t: (t.family, t.id)):
        families.setdefault(task.family, []).append(task)
    return families


def family_levels(families: Mapping[str, list[Task]]) -> dict[str, int]:
    """The level of each family, as a curriculum needs it.

    Raises:
        TaskError: tasks without a level, families that mix levels, or only one level in all; each is named.
    """
    found: dict[str, int] = {}
    problems = []
    for name, tasks in families.items():
        levels = {task.level for task in tasks}
        bare = [task.id for task in tasks if task.level is None]
        if bare:
            problems.append(f"family {name}: {len(bare)} tasks have no [metadata] level, such as {bare[0]}")
        elif len(levels) > 1:
            mixed = " and ".join(str(level) for level in sorted(level for level in levels if level is not None))
            problems.append(f"family {name}: its tasks are of levels {mixed}; it may have one")
        found.update((name, level) for level in levels if level is not None)
    if not problems and len(set(found.values())) < 2:
        problems.append(f"all tasks are of level {next(iter(found.values()), 'none')}; it needs two or more")
    if problems:
        raise TaskError("\n".join(["tasks.curriculum cannot be used", *problems]))
    return found


def pick_tasks(
    families: Mapping[str, list[Task]], *, step: int, count: int, seed: int, stages: Sequence[Stage] | None = None
) -> list[Task]:
    """The tasks of training step ``step`` (from 1): ``count`` of them, the same for the same arguments.

    Families come round in a freshly shuffled order each round, so that every family is met equally often; a
    family's tasks repeat only when all of them have been used, in this stage or an earlier one.

    Args:
        families: tasks by family.
        stages: which families are trained on from when, in order, the first from step 1; all of them when ``None``.
    """
    all_along = [Stage(1, tuple(sorted(families)))]
    begun = [stage for stage in stages or all_along if stage.first_step <= step]
    past_turns = 0
    met = dict.fromkeys(families, 0)
    for stage, following in pairwise(begun):
        turns, rest = divmod((following.first_step - stage.first_step) * count, len(stage.families))
        begun_turn = _order(stage, past_turns + turns, seed)[:rest]
        for name in stage.families:
            met[name] += turns + (name in begun_turn)
        past_turns += turns + (rest > 0)
    stage = begun[-1]
    first = (stage.first_step - 1) * count
    picked: list[Task] = []
    for slot in range((step - 1) * count - first, step * count - first):
        turn, place = divmod(slot, len(stage.families))
        name = _order(stage, past_turns + turn, seed)[place]
        tasks = families[name]
        lap, position = divmod(met[name] + turn, len(tasks))
        shuffled = random.Random(derive_seed(seed, "tasks", name, lap)).sample(range(len(tasks)), len(tasks))
        picked.append(tasks[shuffled[position]])
    return picked


def pick_refills(
    families: Mapping[str, list[Task]],
    *,
    step: int,
    count: int,
    seed: int,
    used: Iterable[str],
    stages: Sequence[Stage] | None = None,
) -> list[Task]:
    """At most ``count`` further tasks for training step ``step``, none of which is in ``used`` or comes twice.

    Drawn like :func:`pick_tasks`, in an order of their own, so that they do not shift what later steps train on.
    """
    drawn = pick_tasks(families, step=step, count=_DRAWS * count, seed=derive_seed(seed, "refill"), stages=stages)
    taken = set(used)
    fresh: list[Task] = []
    for task in drawn:
        if task.id not in taken:
            taken.add(task.id)
            fresh.append(task)
    return fresh[:count]


def _order(stage: Stage, turn: int, seed: int) -> list[str]:
    """The stage's families in the order of one round."""
    return random.Random(derive_seed(seed, "families", turn)).sample(list(stage.families), len(stage.families))
