"""The reward table and the invariants of verdicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from termrl.verifier.outcomes import reward_of
from termrl.verifier.verdict import INFRASTRUCTURE_CAUSES, POLICY_CAUSES, Cause, EndReason, Outcome, Verdict

PASSED = Verdict.scored(1.0)
HALF = Verdict.scored(0.5)
ZERO = Verdict.scored(0.0)
CUT = Verdict.zero(Cause.WALL_CAP)
LOST = Verdict.missing(Cause.SANDBOX_LOST)
GRADED = (
    EndReason.TASK_COMPLETE,
    EndReason.NO_COMMAND,
    EndReason.MAX_TURNS,
    EndReason.LENGTH,
    EndReason.CONTEXT,
)
NEVER = (EndReason.POLICY_ERROR, EndReason.ENVIRONMENT_ERROR, EndReason.ABORTED)

verdicts = st.one_of(
    st.floats(0, 1).map(Verdict.scored),
    st.sampled_from(sorted(POLICY_CAUSES)).map(Verdict.zero),
    st.sampled_from(sorted(INFRASTRUCTURE_CAUSES)).map(Verdict.missing),
)


@pytest.mark.parametrize("graded_cut", [False, True])
@pytest.mark.parametrize("end_reason", GRADED)
@pytest.mark.parametrize(
    ("verdict", "reward", "raw_reward"), [(PASSED, 1, 1), (HALF, 0, 0.5), (ZERO, 0, 0), (LOST, None, None), (None,) * 3]
)
def test_the_verdict_decides_where_the_policy_ended_the_episode(
    end_reason: EndReason, verdict: Verdict | None, reward: float | None, raw_reward: float | None, graded_cut: bool
) -> None:
    assert reward_of(end_reason, verdict, graded_cut=graded_cut) == reward
    assert reward_of(end_reason, verdict, graded_cut=graded_cut, raw=True) == raw_reward


@pytest.mark.parametrize(
    ("verdict", "training", "graded"), [(PASSED, 0, 1), (HALF, 0, 0), (CUT, 0, 0), (LOST, None, None), (None, 0, None)]
)
def test_a_cut_episode_is_zero_in_training_and_graded_in_evaluation(
    verdict: Verdict | None, training: float | None, graded: float | None
) -> None:
    assert reward_of(EndReason.TIMEOUT, verdict, graded_cut=False) == training
    assert reward_of(EndReason.TIMEOUT, verdict, graded_cut=True) == graded


@pytest.mark.parametrize("end_reason", NEVER)
@pytest.mark.parametrize("verdict", [PASSED, HALF, ZERO, CUT, LOST, None])
def test_an_episode_that_infrastructure_ended_never_has_a_reward(
    end_reason: EndReason, verdict: Verdict | None
) -> None:
    for graded_cut in (False, True):
        assert reward_of(end_reason, verdict, graded_cut=graded_cut, raw=True) is None


@given(st.sampled_from(EndReason), st.none() | verdicts, st.booleans(), st.booleans())
def test_nothing_outside_the_listed_causes_gives_a_zero_and_nothing_but_the_tests_gives_a_one(
    end_reason: EndReason, verdict: Verdict | None, graded_cut: bool, raw: bool
) -> None:
    reward = reward_of(end_reason, verdict, graded_cut=graded_cut, raw=raw)
    if reward is None:
        return
    assert end_reason not in NEVER
    assert 0 <= reward <= 1
    wall_cap = end_reason is EndReason.TIMEOUT and not graded_cut
    if reward == 1:
        assert verdict is not None and verdict.outcome is Outcome.PASSED and not wall_cap
    elif not wall_cap:
        assert verdict is not None and verdict.cause in POLICY_CAUSES


def test_every_cause_is_either_the_policys_or_infrastructures() -> None:
    assert set(Cause) == POLICY_CAUSES | INFRASTRUCTURE_CAUSES
    assert {cause.value for cause in POLICY_CAUSES} == {
        "tests_failed",
        "broke_verifier",
        "wall_cap",
        "verifier_timeout_by_policy",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": Outcome.FAILED, "cause": Cause.SANDBOX_LOST},
        {"outcome": Outcome.FAILED},
        {"outcome": Outcome.FAILED, "cause": Cause.TESTS_FAILED, "raw_reward": 1.0},
        {"outcome": Outcome.PASSED, "cause": Cause.TESTS_FAILED},
        {"outcome": Outcome.PASSED, "raw_reward": 0.5},
        {"outcome": Outcome.NO_VERDICT, "cause": Cause.BROKE_VERIFIER},
        {"outcome": Outcome.NO_VERDICT},
        {"outcome": Outcome.NO_VERDICT, "cause": Cause.BAD_REWARD, "raw_reward": 0.0},
        {"outcome": Outcome.FAILED, "cause": Cause.TESTS_FAILED, "raw_reward": -0.1},
        {"outcome": Outcome.FAILED, "cause": Cause.TESTS_FAILED, "raw_reward": float("nan")},
    ],
)
def test_a_verdict_that_contradicts_itself_cannot_be_written_down(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Verdict.model_validate(fields)


@given(verdicts)
def test_a_verdict_survives_the_wire(verdict: Verdict) -> None:
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_a_verdict_without_evidence_can_be_read() -> None:
    assert Verdict.model_validate({"outcome": "passed"}).reward == 1.0
    assert Verdict.model_validate({"outcome": "failed", "cause": "tests_failed"}).reward == 0.0


def test_an_infrastructure_cause_can_never_be_made_a_zero() -> None:
    for cause in INFRASTRUCTURE_CAUSES:
        with pytest.raises(ValueError, match="infrastructure"):
            Verdict.zero(cause)
