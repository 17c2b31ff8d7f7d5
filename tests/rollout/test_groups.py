from __future__ import annotations

from collections.abc import Sequence

import pytest

from termrl.agent.types import Episode
from termrl.capture.segments import Segment
from termrl.rollout.groups import Group, build_batch
from termrl.runs.metrics import capture_metrics, rollout_metrics
from termrl.verifier.verdict import Cause, EndReason, Outcome, Verdict


def episode(reward: float | None, *, sampled: int = 2, end: EndReason = EndReason.TASK_COMPLETE) -> Episode:
    if reward is None:
        verdict = Verdict.missing(Cause.SANDBOX_LOST)
    elif reward == 1:
        verdict = Verdict(outcome=Outcome.PASSED, raw_reward=1.0)
    else:
        verdict = Verdict.zero(Cause.TESTS_FAILED, raw_reward=0.0)
    n = sampled + 1
    segment = Segment("s", (5,) * n, (0, *(1,) * sampled), (0.0, *(-0.5,) * sampled), (-1, *(0,) * sampled), 0.8, 1)
    return Episode("t", 0, end_reason=end, verdict=verdict, reward=reward, segments=(segment,))


def group(index: int, rewards: Sequence[float | None]) -> Group:
    return Group(index, f"task-{index}", "family", tuple(episode(reward) for reward in rewards))


def test_an_episode_without_a_verdict_leaves_the_batch_and_the_baseline() -> None:
    batch = build_batch([group(0, [1.0, None, 0.0, 0.0])])
    assert [sample.episode for sample in batch.samples] == [0, 2, 3]
    assert [sample.advantage for sample in batch.samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert batch.dropped == {"sandbox_lost": 1}
    assert batch.masked == {"no_verdict": 2}
    assert batch.advantages[0, 1] is None


def test_groups_without_a_signal_are_left_out_and_counted() -> None:
    groups = [group(0, [1.0, 1.0]), group(1, [0.0, 0.0]), group(2, [1.0, None]), group(3, [None, None])]
    batch = build_batch([*groups, group(4, [0.0, 1.0])])
    assert {sample.group for sample in batch.samples} == {4}
    assert batch.trained == {(4, 0), (4, 1)}
    assert batch.dead == {"zero_variance": 2, "one_valid": 1, "none_valid": 1}
    assert batch.masked == {"zero_variance": 8, "one_valid": 2, "no_verdict": 6}


def test_every_captured_token_is_trained_or_accounted_for() -> None:
    groups = [group(0, [1.0, 0.0, None]), group(1, [1.0, 1.0, 1.0]), group(2, [None, 0.0, None])]
    batch = build_batch(groups)
    metrics = rollout_metrics(groups, batch)
    in_batch = sum(segment.sampled for sample in batch.samples for segment in sample.segments)
    assert in_batch == metrics["rollout/tokens_captured"] - metrics["rollout/tokens_masked"]


def test_tokens_of_a_skipped_update_are_accounted_for() -> None:
    members = (episode(1.0), episode(0.0, end=EndReason.MAX_TURNS), episode(0.0))
    groups = [Group(0, "t", "f", members), group(1, [1.0, 1.0])]
    batch = build_batch(groups, mask_truncated=True)
    batch.skip("sequence_mask")
    assert batch.masked == {"truncated": 2, "zero_variance": 4, "sequence_mask": 4}
    metrics = rollout_metrics(groups, batch)
    assert metrics["rollout/tokens_captured"] == metrics["rollout/tokens_masked"]
    assert batch.trained == set()


def test_a_skipped_update_of_nothing_masks_nothing() -> None:
    batch = build_batch([group(0, [1.0, 1.0])])
    batch.skip("no_episode")
    assert batch.masked == {"zero_variance": 4}


def test_a_masked_truncated_episode_keeps_its_place_in_the_baseline() -> None:
    members = (episode(1.0), episode(0.0, end=EndReason.MAX_TURNS), episode(0.0))
    batch = build_batch([Group(0, "t", "f", members)], mask_truncated=True)
    assert [sample.truncated for sample in batch.samples] == [False, True, False]
    assert [sample.advantage for sample in batch.samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert batch.masked == {"truncated": 2}


def test_rates_are_over_episodes_with_a_verdict_only() -> None:
    groups = [group(0, [1.0, None, 0.0, None])]
    metrics = rollout_metrics(groups, build_batch(groups))
    assert metrics["rollout/pass_rate"] == 0.5
    assert metrics["rollout/episodes"] == 4
    assert metrics["rollout/episodes_dropped/sandbox_lost"] == 2
    assert metrics["rollout/end_reason/task_complete"] == 4


def test_a_step_without_any_verdict_has_no_rates_at_all() -> None:
    groups = [group(0, [None, None])]
    metrics = rollout_metrics(groups, build_batch(groups))
    assert "rollout/raw_reward" not in metrics
    assert "rollout/pass_rate" not in metrics


def test_fidelity_counters_are_summed_over_sessions() -> None:
    first, second = episode(1.0), episode(0.0)
    first.info["capture"] = {"re_rendered_turns": 1, "branches": 2}
    second.info["capture"] = {"re_rendered_turns": 0, "branches": 1}
    assert capture_metrics([first, second]) == {"rollout/re_rendered_turns": 1, "rollout/branches": 3}
