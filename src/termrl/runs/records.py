"""One episode as the run folder keeps it: a complete, self-contained JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from termrl.agent.types import Episode

Phase = Literal["train", "eval"]


def episode_record(
    episode: Episode,
    *,
    phase: Phase,
    step: int,
    family: str,
    group: int,
    sample: int,
    advantage: float | None = None,
    trained: bool = False,
) -> dict[str, Any]:
    """The episode's line in ``episodes.jsonl``.

    ``tokens`` counts what the policy sampled; the ids themselves are in ``tokens/step-NNNN.parquet`` under the
    same (step, group, sample).
    """
    verdict = episode.verdict
    return {
        "phase": phase,
        "step": step,
        "group": group,
        "sample": sample,
        "task_id": episode.task_id,
        "family": family,
        "seed": episode.seed,
        "reward": episode.reward,
        "end_reason": str(episode.end_reason),
        "cause": None if verdict is None or verdict.cause is None else str(verdict.cause),
        "advantage": advantage,
        "trained": trained,
        "error": episode.error,
        "attempts": episode.info.get("attempts", 1),
        "instruction": episode.instruction,
        "turns": [asdict(turn) for turn in episode.turns],
        "verdict": None if verdict is None else verdict.model_dump(mode="json"),
        "timings": episode.timings,
        "tokens": sum(segment.sampled for segment in episode.segments),
        "sessions": sorted({segment.session_id for segment in episode.segments}),
        "policy_versions": sorted({v for s in episode.segments for v in s.policy_versions if v >= 0}),
        "info": {name: value for name, value in episode.info.items() if name != "attempts"},
    }
