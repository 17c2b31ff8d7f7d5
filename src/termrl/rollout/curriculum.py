"""Which tasks a step trains on: families in turn, each family's tasks in a seeded order without repeats."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from termrl.rollout.seeds import derive_seed
from termrl.tasks.task import Task

_DRAWS = 4  # candidates for each refill; more only matters where nearly all tasks are in the step already


def by_family(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Tasks by family, families and tasks in the order of their names."""
    families: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda t: (t.family, t.id)):
        families.setdefault(task.family, []).append(task)
    return families


def pick_tasks(families: Mapping[str, list[Task]], *, step: int, count: int, seed: int) -> list[Task]:
    """The tasks of training step ``step`` (from 1): ``count`` of them, the same for the same arguments.

    Families come round in a freshly shuffled order each round, so that every family is met equally often; a
    family's tasks repeat only when all of them have been used.
    """
    names = sorted(families)
    picked: list[Task] = []
    for slot in range((step - 1) * count, step * count):
        turn, place = divmod(slot, len(names))
        order = random.Random(derive_seed(seed, "families", turn)).sample(names, len(names))
        name = order[place]
        tasks = families[name]
        lap, position = divmod(turn, len(tasks))
        shuffled = random.Random(derive_seed(seed, "tasks", name, lap)).sample(range(len(tasks)), len(tasks))
        picked.append(tasks[shuffled[position]])
    return picked


def pick_refills(
    families: Mapping[str, list[Task]], *, step: int, count: int, seed: int, used: Iterable[str]
) -> list[Task]:
    """At most ``count`` further tasks for training step ``step``, none of which is in ``used`` or comes twice.

    Drawn like :func:`pick_tasks`, in an order of their own, so that they do not shift what later steps train on.
    """
    drawn = pick_tasks(families, step=step, count=_DRAWS * count, seed=derive_seed(seed, "refill"))
    taken = set(used)
    fresh: list[Task] = []
    for task in drawn:
        if task.id not in taken:
            taken.add(task.id)
            fresh.append(task)
    return fresh[:count]
