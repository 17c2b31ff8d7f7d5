"""What an episode becomes in miles: the dict that is merged into its sample's metadata.

Without a verdict ``reward`` is ``None`` and ``exit_status`` ``aborted``. The key is there all the same, since a sample
that is sampled again keeps its metadata, and an earlier reward must not be taken for this one's. No key may be called
``raw_reward`` or ``round_number``: miles reads those as its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from termrl.agent.types import Episode
from termrl.verifier.verdict import Cause, EndReason, Verdict

ABORTED = "aborted"


def metadata_of(episode: Episode, *, lost: Sequence[str] = ()) -> dict[str, Any]:
    """What the agent function returns for ``episode``; ``lost`` are the causes of tries that were repeated."""
    verdict, timings = episode.verdict, episode.timings
    tool_times = [turn.exec_s for turn in episode.turns if turn.command is not None]
    waits = timings.get("admission_s", 0.0)
    cause = None if verdict is None or verdict.cause is None else str(verdict.cause)
    signals = sorted(verdict.signals) if verdict is not None else []
    metrics = {
        "turns": len(episode.turns),
        "end_reason": str(episode.end_reason),
        "tool_calls": len(tool_times),
        "gen_times": [turn.generation_s for turn in episode.turns],
        "tool_times": tool_times,
        "reset_time": timings.get("reset_s", 0.0),
        "eval_time": timings.get("verify_s", 0.0),
        "total_gen_time": timings.get("generation_s", 0.0),
        # all that is no generation, as miles' throughput accounting takes it
        "total_tool_time": sum(tool_times) + timings.get("reset_s", 0.0) + timings.get("verify_s", 0.0) + waits,
        "queue_time": timings.get("queue_s", 0.0) + waits,
        "outcome": None if verdict is None else str(verdict.outcome),
        "cause": cause,
        "test_exit_code": None if verdict is None else verdict.exit_code,
        "tamper_signals": signals,
        "format_errors": sum(turn.kind == "format_error" for turn in episode.turns),
        "completion_tokens": sum(turn.completion_tokens or 0 for turn in episode.turns),
        "attempts": len(lost) + 1,
        "retried": list(lost),
    }
    return {
        "reward": episode.reward,
        "exit_status": _exit_status(episode),
        "eval_report": _report(verdict, episode.error),
        "agent_metrics": metrics,
    }


def nothing(end_reason: EndReason, cause: Cause, why: str) -> dict[str, Any]:
    """What the agent function returns where there is no episode to tell of."""
    verdict = Verdict.missing(cause, why)
    return metadata_of(Episode(task_id="", seed=0, end_reason=end_reason, verdict=verdict, error=why))


def _exit_status(episode: Episode) -> str:
    if episode.reward is None:
        return ABORTED
    return "timeout" if episode.end_reason is EndReason.TIMEOUT else "completed"


def _report(verdict: Verdict | None, error: str) -> dict[str, Any]:
    if verdict is None:
        return {"outcome": None, "error": error}
    return {
        "outcome": str(verdict.outcome),
        "cause": None if verdict.cause is None else str(verdict.cause),
        "detail": verdict.detail or error,
        "tests_reward": verdict.raw_reward,
        "exit_code": verdict.exit_code,
        "signals": sorted(verdict.signals),
        "integrity": verdict.integrity,
        "harness": verdict.harness,
        "duration_s": verdict.duration_s,
        "attribution": None if verdict.attribution is None else str(verdict.attribution.finding),
    }
