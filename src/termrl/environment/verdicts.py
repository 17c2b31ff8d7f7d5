"""Verdicts on the wire: into an observation's ``info``, and out of an answer to ``evaluate``."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from termrl.environment.protocol import Observation
from termrl.verifier.bootstrap import bootstrap_failure
from termrl.verifier.verdict import HARNESS, Cause, Outcome, Verdict

_CORE = ("outcome", "cause", "raw_reward", "integrity", "harness")
_TIMED_OUT = re.compile(r"tim(?:ed|e)[ -]?out|deadline", re.IGNORECASE)
_NO_EPISODE = re.compile(r"call reset|reset (?:comes )?first|not initialized|no episode", re.IGNORECASE)


def verdict_info(verdict: Verdict) -> dict[str, Any]:
    """What ``info`` says of a verdict: tbench2's two fields, and the whole of it."""
    passed = None if verdict.outcome is Outcome.NO_VERDICT else verdict.outcome is Outcome.PASSED
    return {"verdict": verdict.model_dump(mode="json"), "tests_passed": passed, "harness": verdict.harness}


def verdict_of(observation: Observation) -> Verdict:
    """Read the verdict; anything that is not clearly one is a missing verdict, never a zero.

    An environment of ours sends the whole verdict in ``info["verdict"]``; where it contradicts itself or the reward
    beside it, the environment is at fault (``environment_lost``, which is never attributed to a policy). From any other
    tbench2 environment a verdict is a reward without an error whose ``info["harness"]`` is ``tests/test.sh``.
    """
    whole = observation.info.get("verdict")
    if whole is None:
        return _plain(observation)
    verdict = _whole(whole)
    if isinstance(verdict, str):
        return Verdict.missing(Cause.ENVIRONMENT_LOST, f"the environment's verdict is malformed: {verdict}")
    expected = verdict.reward if verdict.raw_reward is None else verdict.raw_reward
    if observation.reward != expected:
        why = f"the environment's reward {observation.reward} contradicts its verdict {verdict.outcome} ({expected})"
        return Verdict.missing(Cause.ENVIRONMENT_LOST, why)
    if expected is not None and (observation.error or verdict.harness != HARNESS):
        why = observation.error or f"scored by {verdict.harness!r}, not by {HARNESS}"
        return Verdict.missing(Cause.ENVIRONMENT_LOST, f"a verdict with an error: {why}")
    return verdict


def _whole(data: object) -> Verdict | str:
    """A verdict from its JSON; evidence that cannot be read is left out. A string says what is wrong."""
    try:
        return Verdict.model_validate(data)
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
    if not isinstance(data, dict):
        return why
    try:
        return Verdict.model_validate({name: data[name] for name in _CORE if name in data})
    except ValidationError:
        return why


def _plain(observation: Observation) -> Verdict:
    """The verdict of an environment that sends only what tbench2 has."""
    reward, error, output = observation.reward, observation.error, observation.output
    if reward is None or error:
        cause, why = _cause_of(error, output)
        return Verdict.missing(cause, why, output_tail=output)
    harness = observation.info.get("harness")
    if harness != HARNESS:
        why = f"scored by {harness!r}, not by {HARNESS}; fidelity = adapter scores on such a server"
        return Verdict.missing(Cause.ENVIRONMENT_LOST, why, output_tail=output)
    passed = observation.info.get("tests_passed")
    if isinstance(passed, bool) and passed != (reward == 1.0):
        why = f"reward {reward} contradicts tests_passed {passed}"
        return Verdict.missing(Cause.ENVIRONMENT_LOST, why, output_tail=output)
    try:
        return Verdict.scored(reward, output_tail=output)
    except ValueError:
        return Verdict.missing(Cause.BAD_REWARD, f"reward {reward} is outside [0, 1]", output_tail=output)


def _cause_of(error: str, output: str) -> tuple[Cause, str]:
    """A cause for a missing verdict. What a policy could have brought about stays one that can be attributed."""
    download = bootstrap_failure(output)
    if download is not None:
        return Cause.BOOTSTRAP_FAILED, download
    why = error or "the environment gave no reward"
    if _NO_EPISODE.search(error):
        return Cause.ENVIRONMENT_LOST, why
    return (Cause.VERIFIER_TIMEOUT if _TIMED_OUT.search(error) else Cause.VERIFIER_CRASH), why
