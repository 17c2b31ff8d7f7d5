from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from termrl.errors import ModelError, RunError
from termrl.training import checkpoints
from termrl.training.config import TrainingConfig
from termrl.training.trainer import Trainer
from tests.training.support import make_samples

SOURCE = Path(checkpoints.__file__).parents[2]


@pytest.fixture
def trainer(tiny: Path) -> Trainer:
    trainer = Trainer(tiny, TrainingConfig(lr=0.01), seed=0, base_id="acme/tiny")
    trainer.update(make_samples(0))
    return trainer


def test_a_checkpoint_brings_back_the_trainer_and_the_loop(trainer: Trainer, tiny: Path, tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, trainer, step=7, score=0.5, loop={"seen": [1, 2]})
    assert checkpoints.latest(tmp_path) == path
    checkpoint = checkpoints.load(path)
    assert (checkpoint.step, checkpoint.score, checkpoint.loop) == (7, 0.5, {"seen": [1, 2]})
    resumed = Trainer(tiny, TrainingConfig(lr=0.01), seed=1)
    resumed.load_state_dict(checkpoint.trainer)
    for each in (trainer, resumed):
        each.update(make_samples(1))
    for name, weight in trainer.merged_weights().items():
        assert torch.equal(weight, resumed.merged_weights()[name])


def test_the_last_ones_and_the_best_are_kept(trainer: Trainer, tmp_path: Path) -> None:
    for step, score in [(1, 0.2), (2, 0.9), (3, None), (4, 0.9), (5, 0.4)]:
        checkpoints.save(tmp_path, trainer, step=step, score=score, keep_last=2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000002", "step-000004", "step-000005"]
    assert checkpoints.best(tmp_path) == tmp_path / "checkpoints" / "step-000002"


def test_saving_a_step_again_replaces_it(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, trainer, step=1, loop={"n": 1})
    path = checkpoints.save(tmp_path, trainer, step=1, loop={"n": 2})
    assert checkpoints.load(path).loop == {"n": 2}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path) is None
    assert checkpoints.best(tmp_path) is None


def test_a_failure_in_mid_write_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with checkpoints.atomic_folder(target) as folder:
        (folder / "file").write_text("old")
    with pytest.raises(OSError, match="disk"), checkpoints.atomic_folder(target) as folder:
        (folder / "file").write_text("new")
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert (target / "file").read_text() == "old"


def test_sigkill_at_any_moment_leaves_only_whole_folders(tmp_path: Path) -> None:
    script = (
        "import sys, itertools\n"
        "from pathlib import Path\n"
        "from termrl.training.checkpoints import atomic_folder\n"
        "root = Path(sys.argv[1])\n"
        "start = len(list(root.glob('step-*')))\n"
        "print('ready', flush=True)\n"
        "for n in itertools.count(start):\n"
        "    for name in (f'step-{n:06d}', 'always'):\n"
        "        with atomic_folder(root / name) as folder:\n"
        "            for part in range(5):\n"
        "                (folder / str(part)).write_text(str(n) * 2000)\n"
    )
    with checkpoints.atomic_folder(tmp_path / "always") as folder:
        for part in range(5):
            (folder / str(part)).write_text("first")
    rng = random.Random(0)
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.1))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        replaced = {path.read_text() for path in (tmp_path / "always").iterdir()}
        assert len(replaced) == 1
    folders = sorted(tmp_path.glob("step-*"))
    assert len(folders) > 3
    for number, folder in enumerate(folders):
        assert folder.name == f"step-{number:06d}"
        assert {path.name: path.read_text() for path in folder.iterdir()} == {
            str(part): str(number) * 2000 for part in range(5)
        }


def test_what_a_killed_process_left_is_removed_by_the_next_save(trainer: Trainer, tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".partial-step-000001-dead"
    leftover.mkdir(parents=True)
    (leftover / "trainer.safetensors").write_text("half")
    assert checkpoints.latest(tmp_path) is None
    checkpoints.save(tmp_path, trainer, step=2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_a_damaged_checkpoint_is_named(trainer: Trainer, tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, trainer, step=1)
    (path / "trainer.safetensors").write_bytes(b"x")
    with pytest.raises(RunError, match=r"trainer\.safetensors"):
        checkpoints.load(path)
    (path / "checkpoint.json").write_text("[]")
    with pytest.raises(RunError, match=r"checkpoint\.json"):
        checkpoints.load(path)


def test_the_adapter_loads_in_peft_and_gives_the_merged_weights(trainer: Trainer, tiny: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = checkpoints.load(checkpoints.save(tmp_path, trainer, step=1)).adapter
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    for name, weight in trainer.merged_weights().items():
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=0)
    digest = hashlib.sha256((tiny / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (adapter / "README.md").read_text()
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "acme/tiny"


def test_a_merged_export_stands_alone_in_transformers(trainer: Trainer, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (tiny / "tokenizer.json").write_text("{}")
    trainer.save_adapter(tmp_path / "adapter")
    checkpoints.export_merged(tiny, tmp_path / "adapter", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    state = model.state_dict()
    assert model.dtype == torch.float32
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    for name, weight in trainer.merged_weights().items():
        torch.testing.assert_close(state[name], weight, atol=1e-6, rtol=0)
    (tiny / "tokenizer.json").unlink()


def test_an_export_on_other_base_weights_is_refused(trainer: Trainer, tiny: Path, tmp_path: Path) -> None:
    from tests.training.support import save_tiny_model

    trainer.save_adapter(tmp_path / "adapter")
    other = save_tiny_model(tmp_path / "other", "qwen2")
    with pytest.raises(ModelError, match="other base weights"):
        checkpoints.export_merged(other, tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(ModelError, match="not a LoRA adapter"):
        checkpoints.export_merged(tiny, tiny, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        checkpoints.export_merged(tiny, tmp_path / "adapter", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
