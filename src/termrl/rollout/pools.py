"""The tasks of a run: what it trains on and what it is measured on, checked against the sandbox before it starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from termrl.config import TrainConfig
from termrl.errors import ConfigError, TaskError
from termrl.rollout.curriculum import by_family, family_levels
from termrl.sandboxes.base import SandboxProvider
from termrl.tasks.generate import FAMILIES, LEVELS, Family, generate
from termrl.tasks.task import Task
from termrl.tasks.taskset import TaskSet

_NAMED = 10  # broken or refused tasks named in one message


@dataclass(frozen=True)
class TaskPools:
    """Training and held-out tasks. No task is in both.

    Attributes:
        train: by family.
        held_out: evaluated, in (family, id) order.
        untrained: families of ``held_out`` that are never trained on.
        broken: folders left out by ``skip_broken`` → why.
    """

    train: dict[str, list[Task]]
    held_out: list[Task]
    untrained: frozenset[str]
    broken: dict[str, str]

    @property
    def by_id(self) -> dict[str, Task]:
        """Every task by id, as environments want them."""
        return {task.id: task for task in [*(t for ts in self.train.values() for t in ts), *self.held_out]}


def check_families(config: TrainConfig) -> None:
    """Refuse unknown families and levels of the bundled suite, all at once, before anything is written.

    Raises:
        ConfigError: with a suggestion for each, or when no family is left to train on.
    """
    if config.tasks.dir is not None:
        return
    problems = []
    for key in ("tasks.families", "evaluation.families", "evaluation.untrained_families"):
        section, name = key.split(".")
        for family in getattr(getattr(config, section), name):
            if family not in FAMILIES:
                close = difflib.get_close_matches(family, list(FAMILIES), n=1)
                meant = f"; did you mean {close[0]}?" if close else ""
                problems.append(f"settings: {key}: unknown family {family}{meant}")
    for level in config.tasks.levels:
        if level not in LEVELS:
            problems.append(f"settings: tasks.levels: there is no level {level}, only {', '.join(map(str, LEVELS))}")
    if problems:
        raise ConfigError(problems, hint=f"families: {', '.join(FAMILIES)}")
    trained = _trained_families(config)
    if not trained:
        raise ConfigError("settings: tasks.levels: none of the families to train on is of these levels")
    levels = {family.level for family in trained}
    if config.tasks.curriculum.enabled and len(levels) < 2:
        raise ConfigError(
            f"settings: tasks.curriculum.enabled: all families are of level {min(levels)}; it needs two levels or more"
        )


def load_pools(config: TrainConfig) -> TaskPools:
    """The tasks of the folders that the config names.

    Raises:
        TaskError: a folder is missing, empty or holds broken tasks, or training and held-out tasks overlap.
    """
    if config.tasks.dir is None or config.evaluation.dir is None:
        raise ValueError("load_pools needs tasks.dir and evaluation.dir")
    skip = config.tasks.skip_broken
    train = TaskSet.load(config.tasks.dir, skip_broken=skip)
    held_out = TaskSet.load(config.evaluation.dir, skip_broken=skip)
    both = sorted(set(train) & set(held_out))
    if both:
        raise TaskError(
            f"{config.evaluation.dir}: {len(both)} tasks are also in {config.tasks.dir}: {_some(both)}",
            hint="evaluation must be on tasks that are not trained on",
        )
    levels = config.tasks.levels
    of_levels = by_family(task for task in train.values() if not levels or task.level in levels)
    if not of_levels:
        raise TaskError(f"{config.tasks.dir}: no tasks of level {', '.join(map(str, levels))} (tasks.levels)")
    families = _chosen(of_levels, config.tasks.families, config.tasks.dir)
    if not config.tasks.families:
        families = {name: t for name, t in families.items() if name not in config.evaluation.untrained_families}
    if config.tasks.curriculum.enabled:
        family_levels(families)
    evaluated = by_family(held_out.values())
    wanted = (config.evaluation.families or tuple(f for f in evaluated if f in families)) + (
        config.evaluation.untrained_families
    )
    chosen = _chosen(evaluated, wanted, config.evaluation.dir)
    return TaskPools(
        train=families,
        held_out=[task for tasks in chosen.values() for task in tasks],
        untrained=frozenset(chosen) - frozenset(families),
        broken={**train.broken, **held_out.broken},
    )


def tasks_per_family(config: TrainConfig) -> int:
    """How many training tasks of each family are generated: as many as are set, else as the run uses."""
    chosen = _trained_families(config)
    lowest = min(family.level for family in chosen)
    shared = [family for family in chosen if family.level == lowest] if config.tasks.curriculum.enabled else chosen
    uses = -(-config.steps * (config.rollout.groups + config.rollout.refill) // len(shared))
    return config.tasks.per_family or max(1, uses)


def generate_pools(config: TrainConfig, into: Path) -> TaskPools:
    """Write the bundled suite's tasks for this config below ``into`` and load them.

    Held-out tasks are the same whatever the run's seed, so that runs can be compared.
    """
    trained = tuple(family.name for family in _trained_families(config))
    untrained = config.evaluation.untrained_families
    evaluated = (config.evaluation.families or trained) + untrained
    per_family = tasks_per_family(config)
    generate(into / "train", split="train", families=trained, per_family=per_family, seed=config.seed)
    generate(into / "held-out", split="eval", families=evaluated, per_family=config.evaluation.per_family, seed=0)
    train = TaskSet.load(into / "train")
    held_out = by_family(TaskSet.load(into / "held-out").values())
    return TaskPools(
        train=by_family(train.values()),
        held_out=[task for tasks in held_out.values() for task in tasks],
        untrained=frozenset(held_out) - frozenset(trained),
        broken={},
    )


def check_runnable(tasks: Mapping[str, Task], provider: SandboxProvider) -> None:
    """Refuse tasks (by id) that the sandbox cannot run honestly, by name.

    Raises:
        TaskError: names tasks and features.
    """
    refused = {task.id: reason for task in tasks.values() if (reason := provider.refusal(task.sandbox)) is not None}
    if refused:
        lines = [f"{name}: {reason}" for name, reason in list(refused.items())[:_NAMED]]
        more = [f"and {len(refused) - _NAMED} more"] if len(refused) > _NAMED else []
        raise TaskError("\n".join([f"--sandbox {provider.name} cannot run {len(refused)} tasks", *lines, *more]))


def _trained_families(config: TrainConfig) -> list[Family]:
    """The families of the bundled suite that the config trains on, in the suite's or the config's order."""
    tasks = config.tasks
    levels = tasks.levels or (LEVELS if tasks.curriculum.enabled else None)
    if tasks.families:
        names = tasks.families
    else:
        names = tuple(name for name in FAMILIES if name not in config.evaluation.untrained_families)
        levels = levels or LEVELS[:1]
    wanted = levels or LEVELS
    return [FAMILIES[name] for name in dict.fromkeys(names) if FAMILIES[name].level in wanted]


def _chosen(families: Mapping[str, list[Task]], names: Sequence[str], folder: Path) -> dict[str, list[Task]]:
    unknown = [name for name in names if name not in families]
    if unknown:
        raise TaskError(
            f"{folder}: no tasks of family {_some(unknown)}", hint=f"families there: {_some(list(families))}"
        )
    return {name: families[name] for name in (names or families)}


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown}, … ({len(names)} in all)"
