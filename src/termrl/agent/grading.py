"""From an environment's answer to ``evaluate`` to a :class:`~termrl.verifier.verdict.Verdict`."""

from __future__ import annotations

from pydantic import ValidationError

from termrl.environment.protocol import Observation
from termrl.verifier.verdict import HARNESS, Cause, Verdict


def verdict_of(observation: Observation) -> Verdict:
    """Read the verdict; anything that is not clearly one is a missing verdict, never a zero.

    An environment of ours sends the whole verdict in ``info["verdict"]``. From any other tbench2 environment a
    verdict is a reward without an error whose ``info["harness"]`` is ``tests/test.sh``.
    """
    whole = observation.info.get("verdict")
    if whole is not None:
        try:
            return Verdict.model_validate(whole)
        except ValidationError as error:
            return Verdict.missing(Cause.VERIFIER_CRASH, f"the environment's verdict is malformed: {error}")
    reward = observation.reward
    if reward is None or observation.error:
        return Verdict.missing(Cause.VERIFIER_CRASH, observation.error or "the environment gave no reward")
    if observation.info.get("harness") != HARNESS:
        harness = observation.info.get("harness")
        return Verdict.missing(Cause.VERIFIER_CRASH, f"scored by {harness!r}, not by {HARNESS}")
    try:
        return Verdict.scored(reward, output_tail=observation.output)
    except ValueError:
        return Verdict.missing(Cause.BAD_REWARD, f"reward {reward} is outside [0, 1]")
