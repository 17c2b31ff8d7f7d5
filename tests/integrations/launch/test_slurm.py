"""The batch script, run by bash with programs that stand for Slurm's and Ray's and write down how they were called."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from termrl.integrations.miles.launch.profile import load_profile
from termrl.integrations.miles.launch.slurm import batch_script

Termrl = Callable[..., subprocess.CompletedProcess[str]]

_PROGRAMS = {
    "scontrol": 'printf "node-a\\nnode-b\\nnode-c\\n"',
    "hostname": 'echo "192.168.0.1 10.4.0.7 fe80::1 "',
    "scancel": "",
    "termrl": "exit ${TERMRL_CODE:-0}",
    # the first attempt of a worker comes before the head is there
    "ray": 'case "$*" in *--address*) mkdir "$SEEN.$NODE" 2>/dev/null && exit 1;; esac; exit 0',
    # options have their values behind =, but for -w
    "srun": 'while [ "${1#-}" != "$1" ]; do [ "$1" = -w ] && { export NODE=$2; shift; }; shift; done; exec "$@"',
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in _PROGRAMS.items():
        program = folder / name
        program.write_text(f'#!/bin/bash\necho "${{NODE:-batch}}: {name} $*" >> "$SEEN"\n{body}\n')
        program.chmod(0o755)
    return folder


def run_script(tmp_path: Path, programs: Path, *, code: int) -> tuple[int, list[str]]:
    settings = [
        "slurm.network_prefix=10.4.",
        "slurm.setup=export READY=1",
        "cluster.nodes=2",
        "cluster.rollout_nodes=1",
    ]
    profile = load_profile("qwen3-8b", settings=[*settings, 'slurm.srun_args=["--container-image=an image"]'])
    text = batch_script(profile, tmp_path / "run", ["termrl", "launch", "miles", "a profile.toml"])
    text = text.replace("sleep 5", "sleep 0.1")
    seen = tmp_path / "seen"
    environ = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SEEN": str(seen),
        "TERMRL_CODE": str(code),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node-[a-c]",
    }
    done = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, seen.read_text().splitlines()


def test_ray_is_started_on_all_nodes_and_the_launch_on_the_head(tmp_path: Path, programs: Path) -> None:
    code, seen = run_script(tmp_path, programs, code=0)
    assert code == 0
    head = [line for line in seen if line.startswith("node-a: ") and "hostname" not in line]
    assert head == [
        "node-a: ray start --head --node-ip-address=10.4.0.7 --port=6379 --num-gpus=8 --dashboard-port=8265 "
        "--disable-usage-stats",
        "node-a: termrl launch miles a profile.toml --set cluster.ray_address=http://10.4.0.7:8265 "
        "--set cluster.master_addr=10.4.0.7",
    ]
    assert sum("--container-image=an image" in line for line in seen if "srun" in line) == 3
    assert seen.count("batch: scancel 42") == 1


def test_workers_try_again_until_the_head_is_there(tmp_path: Path, programs: Path) -> None:
    script_ended = run_script(tmp_path, programs, code=0)
    assert script_ended[0] == 0
    # the workers are Slurm's to end: here they finish by themselves
    joined: list[int] = []
    for _ in range(100):
        lines = (tmp_path / "seen").read_text().splitlines()
        joined = [
            sum(line.startswith(f"{node}: ray start --address=10.4.0.7:6379") for line in lines)
            for node in ("node-b", "node-c")
        ]
        if joined == [2, 2]:
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert joined == [2, 2]


def test_code_of_the_launch_is_that_of_the_job(tmp_path: Path, programs: Path) -> None:
    code, seen = run_script(tmp_path, programs, code=7)
    assert code == 7
    assert "batch: scancel 42" in seen


def test_script_is_written_with_the_settings_and_goes_on_where_it_is_told_to(tmp_path: Path, termrl: Termrl) -> None:
    run = tmp_path / "run"
    first = termrl("miles", "glm-5.2", "--slurm", "--run-dir", run, "--set", "rollout.num_rollout=9")
    assert (first.returncode, first.stdout) == (0, f"sbatch {run}/launch.sh\n"), first.stderr
    assert f"termrl launch miles {run}/profile.toml --run-dir {run} --mode train" in (run / "launch.sh").read_text()
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("8")
    again = termrl("miles", "--resume", run, "--slurm", "--skip-preflight", "disk")
    assert again.returncode == 0, again.stderr
    text = (run / "launch.sh").read_text()
    assert f"termrl launch miles --resume {run} --mode train --skip-preflight disk --set" in text
    dry = termrl("miles", "--resume", run, "--dry-run")
    assert "--num-rollout 9" in dry.stdout and "# convert" not in dry.stdout
