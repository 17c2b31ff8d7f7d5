from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from termrl.capture.segments import Segment
from termrl.errors import RunError
from termrl.runs.files import append_jsonl, read_jsonl, write_new
from termrl.runs.store import RunStore, TokenRow

SOURCE = Path(__file__).parents[2] / "src"


def create(path: Path) -> RunStore:
    return RunStore.create(path, given="steps = 1\n", resolved="steps = 1\nseed = 0\n")


def run_python(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_new_run_holds_its_configs_and_versions(tmp_path: Path) -> None:
    with create(tmp_path / "deep" / "run") as store:
        assert (store.path / "config.given.toml").read_text() == "steps = 1\n"
        assert store.config() == {"steps": 1, "seed": 0}
        assert "python" in orjson.loads((store.path / "versions.json").read_bytes())
        assert store.checkpoints.is_dir()


def test_a_second_run_in_a_finished_folder_is_refused(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    with pytest.raises(RunError, match="holds a run already"):
        create(tmp_path / "run")


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty"):
        create(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_run_that_another_process_writes_is_refused_even_for_resuming(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    code = (
        "import sys, time, pathlib; from termrl.runs.store import RunStore;"
        "s = RunStore.resume(pathlib.Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    holder = run_python(code, str(tmp_path / "run"))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(RunError, match="another process is running"):
            RunStore.resume(tmp_path / "run")
    finally:
        holder.kill()
        holder.wait()
    RunStore.resume(tmp_path / "run").close()


def test_a_file_where_the_folder_should_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match="cannot make the run folder"):
        create(tmp_path / "run")


def test_two_writers_of_one_new_file_cannot_both_succeed(tmp_path: Path) -> None:
    write_new(tmp_path / "config.toml", b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "config.toml", b"second")
    assert (tmp_path / "config.toml").read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("delay_s", [0.05, 0.13, 0.21])
def test_sigkill_in_mid_write_leaves_whole_files(tmp_path: Path, delay_s: float) -> None:
    code = (
        "import sys, pathlib; from termrl.runs.store import RunStore\n"
        "s = RunStore.create(pathlib.Path(sys.argv[1]), given='', resolved='a = 1')\n"
        "print('go', flush=True)\n"
        "for n in range(10**9):\n"
        "    s.append_episodes([{'step': n, 'phase': 'train', 'i': i, 'text': 'x' * 3000} for i in range(200)])\n"
        "    s.write_summary({'n': n, 'text': 'y' * 300000, 'end': n})\n"
    )
    writer = run_python(code, str(tmp_path / "run"))
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"go\n"
    time.sleep(delay_s)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with RunStore.resume(tmp_path / "run") as store:
        records = list(store.episodes())
        assert len(records) > 0
        assert all(len(r["text"]) == 3000 for r in records)
        summary = store.path / "summary.json"
        if summary.exists():
            read = orjson.loads(summary.read_bytes())
            assert read["n"] == read["end"]
        last = records[-1]["step"] - 1
        lines = (store.path / "episodes.jsonl").read_bytes().splitlines(keepends=True)
        store.rewind({"metrics.jsonl": 0, "episodes.jsonl": len(b"".join(lines[: 200 * (last + 1)]))}, step=last)
        assert not [p.name for p in store.path.iterdir() if p.name.startswith(".")]
        kept = list(store.episodes())
        assert len(kept) == 200 * (last + 1)
        store.append_episodes([{"step": last + 1, "phase": "train"}])
        assert list(store.episodes())[-1] == {"step": last + 1, "phase": "train"}


def test_a_torn_last_line_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append_jsonl(log, [{"a": 1}, {"a": 2}])
    with log.open("ab") as stream:
        stream.write(b'{"a": 3')
    assert list(read_jsonl(log)) == [{"a": 1}, {"a": 2}]


def test_tokens_read_back_exactly(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    segment = Segment("s", (1, 2, 49151), (0, 1, 1), (0.0, -0.5, -1.25), (-1, 3, 3), 0.8, 1)
    with create(tmp_path / "run") as store:
        path = store.write_tokens(3, [TokenRow(3, 0, 1, "t", 1.0, 0.5, True, segment)])
        [row] = pq.read_table(path).to_pylist()
    assert row["token_ids"] == [1, 2, 49151]
    assert row["logprobs"] == [0.0, -0.5, -1.25]
    assert (row["step"], row["advantage"], row["trained"], row["policy_versions"]) == (3, 0.5, True, [-1, 3, 3])


def test_rewinding_forgets_what_came_after_the_mark(tmp_path: Path) -> None:
    segment = Segment("s", (1,), (1,), (-0.5,), (0,), 0.8, 1)
    with create(tmp_path / "run") as store:
        marks = []
        for step in (1, 2, 3):
            store.append_episodes([{"step": step, "phase": "train"}])
            store.append_metrics({"step": step, "phase": "train"})
            marks.append(store.mark())
            store.append_episodes([{"step": step, "phase": "eval"}])
            store.append_metrics({"step": step, "phase": "eval"})
            store.write_tokens(step, [TokenRow(step, 0, 0, "t", 1.0, 0.5, True, segment)])
        store.write_summary({"done": True})
        store.rewind(marks[1], step=2)
        kept = [(1, "train"), (1, "eval"), (2, "train")]
        assert [(r["step"], r["phase"]) for r in store.metrics()] == kept
        assert [(r["step"], r["phase"]) for r in store.episodes()] == kept
        assert sorted(p.name for p in (store.path / "tokens").iterdir()) == ["step-0001.parquet", "step-0002.parquet"]
        assert not (store.path / "summary.json").exists()
        with pytest.raises(RunError, match="bytes where"):
            store.rewind(marks[2], step=3)
        store.rewind(None, step=0)
        assert list(store.metrics()) == list(store.episodes()) == list((store.path / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    "written",
    [[], [".config.given.toml.x"], ["config.given.toml"], ["config.given.toml", "versions.json", ".config.toml.x"]],
)
def test_a_beginning_that_was_killed_is_begun_again_and_cannot_be_resumed(tmp_path: Path, written: list[str]) -> None:
    run = tmp_path / "run"
    for folder in ("tokens", "checkpoints"):
        (run / folder).mkdir(parents=True)
    for name in written:
        (run / name).write_text("half")
    with pytest.raises(RunError, match="no run to resume") as refused:
        RunStore.resume(run)
    assert "started again" in (refused.value.hint or "")
    with create(run) as store:
        assert store.config() == {"steps": 1, "seed": 0}
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
