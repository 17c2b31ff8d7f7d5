"""What a run came to, without what measures time: two runs of the same settings must agree on all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from termrl.runs.files import read_jsonl

_OF_THIS_TIME = ("timings", "sessions", "session_id", "run_dir", "seconds", "wall_s", "versions")


def outcome(run: Path) -> dict[str, Any]:
    """Metrics, episodes, tokens, summary, and the newest checkpoint's score and tensors."""
    import pyarrow.parquet as pq

    newest = sorted(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))[-1]
    return {
        "metrics": timeless(list(read_jsonl(run / "metrics.jsonl"))),
        "episodes": timeless(list(read_jsonl(run / "episodes.jsonl"))),
        "tokens": {
            path.name: pq.read_table(path).drop(["session_id"]).to_pylist()
            for path in sorted((run / "tokens").iterdir())
        },
        "summary": timeless(orjson.loads((run / "summary.json").read_bytes())),
        "checkpoint": {
            "score": orjson.loads((newest / "checkpoint.json").read_bytes())["score"],
            **{str(path.relative_to(newest)): _tensors(path) for path in sorted(newest.rglob("*.safetensors"))},
        },
        "kept": sorted(path.name for path in (run / "checkpoints").iterdir()),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The parts of two outcomes that differ."""
    return [part for part in one if one[part] != other[part]]


def timeless(value: Any) -> Any:
    """Without seconds, rates and names that are drawn anew each time."""
    if isinstance(value, dict):
        return {
            key: timeless(inner)
            for key, inner in value.items()
            if not (key in _OF_THIS_TIME or key.endswith("_s") or key.startswith("perf/"))
        }
    if isinstance(value, list):
        return [timeless(inner) for inner in value]
    return value


def _tensors(path: Path) -> dict[str, str]:
    """The sha256 of each tensor (the file's order of them is not fixed)."""
    from safetensors.numpy import load_file

    return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in sorted(load_file(path).items())}
