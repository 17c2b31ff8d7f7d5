from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
VERBS = ("train", "serve", "tasks", "validate", "probe", "export", "doctor", "sweep")


def termrl(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "termrl", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_verb() -> None:
    done = termrl("--help")
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in VERBS)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from termrl.cli import run; run(['--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'openai', 'starlette', 'aiohttp', 'pydantic'};"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_answers_within_half_a_second() -> None:
    def once() -> float:
        start = time.monotonic()
        termrl("--help")
        return time.monotonic() - start

    assert min(once() for _ in range(4)) < 0.5


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    done = termrl(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert f"termrl {verb}" in done.stdout


def test_bad_settings_are_all_named_at_once_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("stepz = 3\n[rollout]\ngroups = 0\n")
    done = termrl("train", "-c", "bad.toml", "--training.lrr", "1", "--seed=x", cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.toml: stepz: unknown key; did you mean steps?" in done.stderr
    assert "bad.toml: rollout.groups: input should be greater than or equal to 1 (got 0)" in done.stderr
    assert "command line: training.lrr: unknown key; did you mean training.lr?" in done.stderr
    assert "command line: seed: input should be a valid integer" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["bad.toml"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("trian",), 2, "unknown command trian; did you mean train?"),
        (("train", "-c"), 2, "requires an argument"),
        (("train", "-c", "absent.toml"), 2, "absent.toml: no such file"),
        (("train", "--resume", "absent"), 1, "absent: no run to resume here"),
        (("train", "--tasks.dir", "here"), 2, "evaluation.dir is required"),
        (("train", "--tasks.dir", "absent", "--evaluation.dir", "absent"), 2, "absent: no such folder"),
        (("train", "--tasks.families", "make-dirr"), 2, "unknown family make-dirr; did you mean make-dir?"),
        (("train", "--sampling.top-p", "0.9"), 2, "must be 1 in training"),
        (("train", "--sandbox", "bubblewarp"), 2, "bubblewarp"),
        (("train", "--skip-broken", "--tasks", "absent", "--evaluation.dir", "x"), 2, "absent: no such folder"),
        (("train", "--episode.opening", "first-stepz"), 2, "first-stepz"),
        (("train", "--model.path", "./no-model"), 2, "no-model: no such model folder"),
        (("export", "absent", "--out", "x"), 1, "absent: no run there"),
        (("export",), 2, "requires an argument"),
    ],
)
def test_bad_input_is_one_clear_message_without_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = termrl(*arguments, cwd=tmp_path)
    assert message in done.stderr
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback() -> None:
    done = termrl("--debug", "train", "-c", "absent.toml")
    assert "Traceback" in done.stderr
    assert done.returncode != 0


def test_keys_lists_every_setting() -> None:
    done = termrl("train", "--keys", COLUMNS="200")
    assert done.returncode == 0
    for key in ("steps", "training.lr", "training.lora.rank", "rollout.schedule", "evaluation.untrained_families"):
        assert key in done.stdout
