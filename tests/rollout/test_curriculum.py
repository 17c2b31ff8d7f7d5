"""The curriculum: when a level opens, what is trained on from then, and that it never loses its place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from termrl.agent.types import Episode
from termrl.config import CurriculumConfig, EvaluationConfig, StopConfig, TasksConfig, TrainConfig
from termrl.errors import ConfigError, TaskError
from termrl.rollout.curriculum import Curriculum, Stage, by_family, family_levels, pick_tasks
from termrl.rollout.groups import Batch, Group
from termrl.rollout.pools import TaskPools, check_families, generate_pools, load_pools
from termrl.runs.progress import Progress
from termrl.sandboxes.base import SandboxSpec
from termrl.tasks.generate import FAMILIES, generate
from termrl.tasks.task import Task
from termrl.verifier.verdict import EndReason

LEVELS = {"a": 1, "b": 1, "c": 2, "d": 4}


def task(family: str, index: int, level: int | None) -> Task:
    name = f"{family}-{index}"
    metadata = {"family": family} if level is None else {"family": family, "level": level}
    spec = SandboxSpec(task_id=name)
    return Task(name, Path("/x"), "", Path("/x"), solution=None, sandbox=spec, metadata=metadata)


TASKS = by_family(task(family, index, level) for family, level in LEVELS.items() for index in range(12))


def group(family: str, rewards: Sequence[float | None], index: int = 0) -> Group:
    episodes = tuple(Episode("t", 0, end_reason=EndReason.TASK_COMPLETE, reward=reward) for reward in rewards)
    return Group(index, f"{family}-0", family, episodes)


def config(threshold: float = 0.75, window: int = 2) -> CurriculumConfig:
    return CurriculumConfig(enabled=True, threshold=threshold, window=window)


def test_a_level_opens_at_the_step_after_its_lower_one_passed_over_the_whole_window() -> None:
    curriculum = Curriculum.begin(LEVELS)
    steps = [[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    moved = [curriculum.finish_step(i, [group("a", rewards)], LEVELS, config()) for i, rewards in enumerate(steps, 1)]
    assert moved == [False, True, False, False]
    assert (curriculum.opened, curriculum.level) == ({1: 1, 2: 3}, 2)


def test_just_below_the_threshold_nothing_opens() -> None:
    curriculum = Curriculum.begin(LEVELS)
    for step in range(1, 9):
        assert not curriculum.finish_step(step, [group("a", [1.0, 0.0, 1.0, 0.0])], LEVELS, config(0.51))
    assert curriculum.finish_step(9, [group("a", [1.0, 1.0, 1.0, 0.0])], LEVELS, config(0.51))


@pytest.mark.parametrize(("passed", "graded", "threshold"), [(7, 10, 0.7), (3, 10, 0.3), (1, 3, 1 / 3), (9, 9, 1.0)])
def test_the_very_threshold_opens(passed: int, graded: int, threshold: float) -> None:
    curriculum = Curriculum.begin(LEVELS)
    rewards = [float(index < passed) for index in range(graded)]
    assert curriculum.finish_step(1, [group("b", rewards)], LEVELS, config(threshold, window=1))


def test_only_the_highest_open_levels_episodes_count() -> None:
    curriculum = Curriculum({1: 1, 2: 2})
    low = group("a", [1.0] * 8)
    assert not curriculum.finish_step(3, [low, group("c", [1.0, 0.0, 0.0], 1)], LEVELS, config(0.5, window=1))
    assert curriculum.finish_step(4, [low, group("c", [1.0, 1.0, 0.0], 1)], LEVELS, config(0.5, window=1))
    assert curriculum.opened == {1: 1, 2: 2, 4: 5}


def test_episodes_without_a_verdict_and_steps_without_that_level_do_not_count() -> None:
    curriculum = Curriculum({1: 1, 2: 2})
    assert not curriculum.finish_step(3, [group("c", [1.0, None, None])], LEVELS, config())
    assert not curriculum.finish_step(4, [group("c", [None]), group("a", [0.0], 1)], LEVELS, config())
    assert curriculum.recent == [(1, 1)]
    assert curriculum.finish_step(5, [group("c", [1.0, None])], LEVELS, config())


def test_a_fraction_of_the_reward_is_no_pass() -> None:
    curriculum = Curriculum.begin(LEVELS)
    assert not curriculum.finish_step(1, [group("a", [0.9, 0.9])], LEVELS, config(0.1, window=1))


def test_above_the_last_level_nothing_opens() -> None:
    curriculum = Curriculum({1: 1, 2: 2, 4: 3})
    assert curriculum.next_level(LEVELS) is None
    assert not curriculum.finish_step(4, [group("d", [1.0])], LEVELS, config(window=1))


def test_stages_hold_every_family_up_to_the_open_level() -> None:
    stages = Curriculum({1: 1, 2: 4, 4: 9}).stages(LEVELS)
    assert stages == [Stage(1, ("a", "b")), Stage(4, ("a", "b", "c")), Stage(9, ("a", "b", "c", "d"))]


def test_without_stages_the_picks_are_those_of_one_stage_with_all_families() -> None:
    families = by_family(task(family, index, 1) for family in "abc" for index in range(4))
    picked = [t.id for step in (1, 2, 9) for t in pick_tasks(families, step=step, count=5, seed=7)]
    # a run's tasks are part of its result: these do not change
    assert " ".join(picked) == "a-0 c-2 b-3 b-2 a-3 c-3 c-1 a-1 b-1 a-2 a-0 c-2 b-2 a-2 c-1"
    stages = [Stage(1, ("a", "b", "c"))]
    assert picked == [
        t.id for step in (1, 2, 9) for t in pick_tasks(families, step=step, count=5, seed=7, stages=stages)
    ]


@given(count=st.integers(1, 7), opens=st.lists(st.integers(1, 5), min_size=2, max_size=2), seed=st.integers(0, 99))
def test_over_all_stages_families_are_met_equally_often_and_no_task_repeats_too_early(
    count: int, opens: list[int], seed: int
) -> None:
    second, third = 1 + opens[0], 1 + sum(opens)
    stages = Curriculum({1: 1, 2: second, 4: third}).stages(LEVELS)
    bounds = [(1, second), (second, third), (third, third + 4)]
    everything: list[str] = []
    for stage, (first, end) in zip(stages, bounds, strict=True):
        met: Counter[str] = Counter(dict.fromkeys(stage.families, 0))
        for step in range(first, end):
            picked = pick_tasks(TASKS, step=step, count=count, seed=seed, stages=stages)
            met.update(t.family for t in picked)
            everything += [t.id for t in picked]
        assert set(met) == set(stage.families)
        assert max(met.values()) - min(met.values()) <= 1
    for family, tasks in TASKS.items():
        ids = [name for name in everything if name.startswith(f"{family}-")]
        for lap in range(0, len(ids), len(tasks)):
            chunk = ids[lap : lap + len(tasks)]
            assert len(set(chunk)) == len(chunk)


def test_what_opens_later_does_not_change_what_was_picked_before() -> None:
    early, late = Curriculum({1: 1, 2: 4}).stages(LEVELS), Curriculum({1: 1, 2: 4, 4: 6}).stages(LEVELS)
    for step in range(1, 6):
        assert pick_tasks(TASKS, step=step, count=3, seed=1, stages=early) == pick_tasks(
            TASKS, step=step, count=3, seed=1, stages=late
        )


def test_progress_brings_the_curriculum_back_through_json() -> None:
    curriculum = Curriculum({1: 1, 2: 4}, [(3, 8), (5, 7)])
    saved = json.loads(json.dumps(Progress(step=6, curriculum=curriculum).state()))
    back = Progress.from_state(saved).curriculum
    assert back == curriculum
    assert back is not None
    assert back.finish_step(7, [group("c", [1.0] * 9)], LEVELS, config(0.8))
    assert Progress.from_state(json.loads(json.dumps(Progress().state()))).curriculum is None


def test_moving_up_forgets_that_the_lower_level_was_solved_or_dead() -> None:
    progress = Progress()
    perf = {"rollout/episodes": 8, "rollout/tokens_captured": 0, "perf/step_s": 0.1, "rollout/commands_run": 1}
    for step in range(1, 6):
        progress.finish_step(step, {**perf, "rollout/raw_reward": 0.0}, Batch())
    assert progress.dead_steps == 5
    progress.moved_up()
    progress.finish_step(6, {**perf, "rollout/raw_reward": 0.0}, Batch())
    assert progress.hopeless(StopConfig(dead_steps=6)) is None


def test_tasks_that_a_curriculum_cannot_order_are_named() -> None:
    mixed = by_family([task("a", 0, 1), task("a", 1, 2), task("b", 0, None), task("c", 0, 1)])
    with pytest.raises(TaskError, match=r"family a: its tasks are of levels 1 and 2(.|\n)*family b: 1 tasks .* b-0"):
        family_levels(mixed)
    with pytest.raises(TaskError, match="all tasks are of level 1"):
        family_levels(by_family([task("a", 0, 1), task("c", 0, 1)]))
    assert family_levels(TASKS) == LEVELS


@pytest.mark.parametrize("values", [{"threshold": 0}, {"threshold": 1.5}, {"window": 0}])
def test_a_threshold_or_window_that_means_nothing_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CurriculumConfig.model_validate(values)


def _config(untrained: tuple[str, ...] = (), **tasks: object) -> TrainConfig:
    evaluation = EvaluationConfig(untrained_families=untrained, per_family=1)
    return TrainConfig(steps=2, tasks=TasksConfig.model_validate(tasks), evaluation=evaluation)


def test_levels_choose_the_bundled_families_and_untrained_ones_stay_out(tmp_path: Path) -> None:
    pools = generate_pools(_config(("sort-file", "pack-dir"), levels=(2,), per_family=1), tmp_path)
    wanted = {name for name, family in FAMILIES.items() if family.level == 2} - {"sort-file", "pack-dir"}
    assert set(pools.train) == wanted
    assert pools.untrained == {"sort-file", "pack-dir"}
    assert {t.family for t in pools.held_out} == wanted | pools.untrained


def test_levels_filter_named_families(tmp_path: Path) -> None:
    pools = generate_pools(_config(families=("make-dir", "sort-file"), levels=(2,), per_family=1), tmp_path)
    assert set(pools.train) == {"sort-file"}


def test_a_curriculum_takes_all_levels_and_enough_tasks_for_the_lowest(tmp_path: Path) -> None:
    pools = generate_pools(_config(families=("make-dir", "sort-file"), curriculum={"enabled": True}), tmp_path)
    assert {name: len(found) for name, found in pools.train.items()} == {"make-dir": 16, "sort-file": 16}
    assert set(generate_pools(_config(curriculum={"enabled": True}, per_family=1), tmp_path / "all").train) == set(
        FAMILIES
    )


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"levels": (7,)}, "tasks.levels: there is no level 7, only 1, 2, 3"),
        ({"levels": (3,), "families": ("make-dir",)}, "none of the families to train on is of these levels"),
        ({"levels": (2,), "curriculum": {"enabled": True}}, "all families are of level 2; it needs two"),
    ],
)
def test_bad_levels_are_refused_before_anything_is_written(tasks: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_families(TrainConfig(tasks=TasksConfig.model_validate(tasks)))


def test_levels_of_task_folders(tmp_path: Path) -> None:
    generate(tmp_path / "train", families=["make-dir", "sort-file", "line-ends"], per_family=1)
    generate(tmp_path / "eval", families=["make-dir", "sort-file", "line-ends"], per_family=1, split="eval")

    def pools(untrained: tuple[str, ...] = (), **tasks: object) -> TaskPools:
        evaluation = EvaluationConfig(dir=tmp_path / "eval", untrained_families=untrained)
        sources = TasksConfig.model_validate({"dir": tmp_path / "train", **tasks})
        return load_pools(TrainConfig(tasks=sources, evaluation=evaluation))

    assert set(pools(levels=(1, 3)).train) == {"make-dir", "line-ends"}
    assert [t.family for t in pools(levels=(1, 3)).held_out] == ["line-ends", "make-dir"]
    assert pools(("line-ends",)).untrained == {"line-ends"}
    assert set(pools(("line-ends",)).train) == {"make-dir", "sort-file"}
    with pytest.raises(TaskError, match="no tasks of level 5"):
        pools(levels=(5,))
    with pytest.raises(TaskError, match="all tasks are of level 3"):
        pools(levels=(3,), curriculum={"enabled": True})
