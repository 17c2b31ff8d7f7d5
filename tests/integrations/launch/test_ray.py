"""Steps as jobs of a real Ray cluster of two nodes on this machine.

Left out unless ``TERMRL_TEST_RAY`` names a Python that has ray and termrl's dependencies: ray is 400 MB, is not among
termrl's own, and a cluster takes about 20 s to start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from termrl.integrations.miles.launch import node
from termrl.runs.files import read_jsonl
from tests.integrations.launch.conftest import SOURCE, environ
from tests.integrations.launch.fake_miles import fake_miles, rows, settings
from tests.integrations.launch.test_processes import ours, wait_for

RAY = os.environ.get("TERMRL_TEST_RAY", "")

pytestmark = [
    pytest.mark.skipif(not RAY, reason="TERMRL_TEST_RAY names no Python with ray: 400 MB, 20 s to start a cluster"),
    pytest.mark.timeout(300),
]

_CLUSTER = """\
import sys
from ray.cluster_utils import Cluster

dashboard = {"include_dashboard": True, "dashboard_port": int(sys.argv[1]), "dashboard_host": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 4, **dashboard})
cluster.add_node(num_cpus=2, num_gpus=4)
cluster.wait_for_nodes()
print("ready", flush=True)
sys.stdin.read()
cluster.shutdown()
"""
SKIPPED = ("--skip-preflight", "environment")


@dataclass(frozen=True)
class Cluster:
    address: str
    folder: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("ray")
    process = subprocess.Popen(
        [RAY, "-c", _CLUSTER, str(port)],
        env=environ(RAY_TMPDIR="/tmp", RAY_DISABLE_IMPORT_WARNING="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        while (line := process.stdout.readline()) != "ready\n":
            assert line, "the cluster did not start"
        yield Cluster(f"http://127.0.0.1:{port}", folder)
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def words(cluster: Cluster, folder: Path, *more: str) -> list[str]:
    root = fake_miles(folder)
    given = settings(folder, root, rows(folder / "train.jsonl", ["one", "two"]))
    return [
        *(RAY, "-m", "termrl", "launch", "miles", "qwen3-8b", *given, "--run-dir", str(folder / "run"), *SKIPPED),
        *("--set", f"paths.python={RAY}", "--set", f"cluster.ray_address={cluster.address}"),
        *("--set", f"env.PYTHONPATH={SOURCE}", *more),
    ]


def test_steps_are_jobs_that_the_folder_records(cluster: Cluster, tmp_path: Path) -> None:
    done = subprocess.run(
        words(cluster, tmp_path),
        env=environ(HF_TOKEN="stays-here"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert ours(tmp_path) == []
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["argv"][:4] == ["--num-layers", "4", "--moe-layer-freq", "[0]*1+[1]*3"]
    assert "HF_TOKEN" not in seen["env"]
    assert "step 1 of 1" in done.stdout
    assert "step 1 of 1" in (tmp_path / "run" / "logs" / "train.log").read_text()
    jobs = [record for record in read_jsonl(tmp_path / "run" / "processes.jsonl") if record["kind"] == "job"]
    assert [job["step"] for job in jobs] == ["download", "convert", "train"]
    assert all(job["id"].startswith(f"termrl-run-{job['step']}-") for job in jobs)


def test_failed_job_fails_the_launch(cluster: Cluster, tmp_path: Path) -> None:
    command = words(cluster, tmp_path, "--set", "env.PLAY=7")
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr
    assert "train: ended with code 1" in done.stderr


def test_interrupted_launch_stops_its_job(cluster: Cluster, tmp_path: Path) -> None:
    launcher = subprocess.Popen(words(cluster, tmp_path, "--set", "env.PLAY=stay"), env=environ())
    try:
        give_up = time.monotonic() + 120
        while not (tmp_path / "seen.json").exists():
            assert time.monotonic() < give_up and launcher.poll() is None
            time.sleep(0.2)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 130
        # Ray calls a job stopped as soon as it is told to, and gives it 3 s to end
        wait_for(lambda: ours(tmp_path) == [], 10)
    finally:
        launcher.kill()
        launcher.wait()
    job = [record["id"] for record in read_jsonl(tmp_path / "run" / "processes.jsonl")][-1]
    code = f"from ray.job_submission import *; print(JobSubmissionClient({cluster.address!r}).get_job_status({job!r}))"
    status = subprocess.run([RAY, "-c", code], env=environ(), capture_output=True, text=True, timeout=60, check=False)
    assert status.stdout.strip() == "STOPPED"


def ask(cluster: Cluster, words: list[str]) -> tuple[str, str]:
    """Run a job of the cluster; returns how it ended and what it printed."""
    entry = (
        "import json, shlex, sys, time; from ray.job_submission import JobSubmissionClient\n"
        "address, source, words = sys.argv[1], sys.argv[2], sys.argv[3:]\n"
        "client = JobSubmissionClient(address)\n"
        "job = client.submit_job(entrypoint=shlex.join(words), runtime_env={'env_vars': {'PYTHONPATH': source}})\n"
        "while not client.get_job_status(job).is_terminal(): time.sleep(0.2)\n"
        "print(json.dumps([client.get_job_status(job).value, client.get_job_logs(job)]))\n"
    )
    command = [RAY, "-c", entry, cluster.address, str(SOURCE), *words]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    status, logs = json.loads(done.stdout.splitlines()[-1])
    return status, logs


def test_command_runs_on_every_node_with_its_rank(cluster: Cluster, tmp_path: Path) -> None:
    command = ["bash", "-c", f"echo {{master_addr}} > {tmp_path}/{{node_rank}}; exit {{node_rank}}"]
    words = [RAY, "-m", "termrl.integrations.miles.launch.every_node", "--nodes", "2", "--", *command]
    status, logs = ask(cluster, words)
    assert status == "FAILED", logs  # the second node's command ends with 1
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() != "\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    status, logs = ask(cluster, [*words[:4], "3", *words[5:]])
    assert "3 nodes are needed, the Ray cluster has 2" in logs


def test_gpus_of_the_whole_cluster_are_counted(cluster: Cluster) -> None:
    _, logs = ask(cluster, [RAY, *node.arguments(node.Wanted(ray=True, gpus=16, wait_s=1.0))])
    facts = node.found_in(logs)
    assert facts is not None and facts.gpus == 8, logs
