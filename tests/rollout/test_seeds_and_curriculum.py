from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from termrl.rollout.curriculum import by_family, pick_refills, pick_tasks
from termrl.rollout.seeds import derive_seed
from termrl.sandboxes.base import SandboxSpec
from termrl.tasks.task import Task


def task(family: str, index: int) -> Task:
    name = f"{family}-{index}"
    return Task(
        id=name,
        path=Path("/x"),
        instruction="",
        tests=Path("/x"),
        solution=None,
        sandbox=SandboxSpec(task_id=name),
        metadata={"family": family},
    )


FAMILIES = by_family([task(family, index) for family in ("a", "b", "c") for index in range(4)])


def test_a_seed_depends_on_every_part_and_their_order() -> None:
    seeds = {
        derive_seed(0, 1, "t", 2),
        derive_seed(1, 1, "t", 2),
        derive_seed(0, 2, "t", 2),
        derive_seed(0, 1, "u", 2),
        derive_seed(0, 1, "t", 3),
        derive_seed(1, 0, "t", 2),
        derive_seed(0, "1", "t", 2),
        derive_seed(0, 1, "t2"),
        derive_seed(0, 11, "t", 2),
    }
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_on_every_machine() -> None:
    assert derive_seed(0, 1, "task", 2) == derive_seed(0, 1, "task", 2) == 1253409509799814323


def test_families_are_met_equally_often() -> None:
    met = Counter(t.family for step in range(1, 7) for t in pick_tasks(FAMILIES, step=step, count=4, seed=0))
    assert met == {"a": 8, "b": 8, "c": 8}


def test_no_task_repeats_before_all_of_its_family_were_used() -> None:
    order = [t.id for step in range(1, 4) for t in pick_tasks(FAMILIES, step=step, count=4, seed=3)]
    assert len(set(order)) == 12


@pytest.mark.parametrize("step", [1, 2, 9])
def test_a_step_picks_the_same_tasks_whatever_came_before(step: int) -> None:
    first = [t.id for t in pick_tasks(FAMILIES, step=step, count=5, seed=7)]
    assert first == [t.id for t in pick_tasks(FAMILIES, step=step, count=5, seed=7)]
    assert first != [t.id for t in pick_tasks(FAMILIES, step=step, count=5, seed=8)]


def test_refills_are_other_tasks_the_same_each_time() -> None:
    used = [picked.id for picked in pick_tasks(FAMILIES, step=2, count=3, seed=0)]
    refills = [pick_refills(FAMILIES, step=2, count=4, seed=0, used=used) for _ in range(2)]
    assert refills[0] == refills[1]
    names = [picked.id for picked in refills[0]]
    assert len(set(names)) == len(names) == 4
    assert not set(names) & set(used)
    assert [picked.id for picked in pick_refills(FAMILIES, step=3, count=4, seed=0, used=used)] != names


def test_there_are_no_refills_where_every_task_is_in_the_step() -> None:
    every = [picked.id for tasks in FAMILIES.values() for picked in tasks]
    assert pick_refills(FAMILIES, step=1, count=3, seed=0, used=every) == []
