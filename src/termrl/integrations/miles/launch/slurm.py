"""The batch script of a run on several nodes: Ray on all of them, then this very launch on the first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from termrl.integrations.miles.launch.profile import Profile

RAY_PORT = 6379
DASHBOARD_PORT = 8265


def batch_script(profile: Profile, run: Path, again: Sequence[str]) -> str:
    """The script for ``sbatch``.

    Args:
        again: the words of the launch, without its Ray address; run on the first node.
    """
    cluster, slurm = profile.cluster, profile.slurm
    nodes = cluster.nodes + cluster.rollout_nodes
    options = {
        "job-name": run.name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": cluster.gpus_per_node,
        "mem": 0,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "output": f"{run}/slurm-%j.log",
    }
    header = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    gpus = cluster.gpus_per_node
    srun = shlex.join(["srun", "--overlap", "--ntasks=1", "--nodes=1", f"--gpus-per-node={gpus}", *slurm.srun_args])
    prefix = re.escape(slurm.network_prefix or "")
    chosen = f"grep -m1 {shlex.quote('^' + prefix)}" if prefix else "head -n1"
    return "\n".join(
        [
            "#!/bin/bash",
            *header,
            "set -euo pipefail",
            "",
            'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'addresses=$(srun --overlap --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname -I)',
            f"head_ip=$(tr ' ' '\\n' <<< \"$addresses\" | {chosen})",
            'export head_ip; echo "head ${nodes[0]} ($head_ip), ${#nodes[@]} nodes"',
            "",
            "on_head() {",
            "  set -e",
            *_lines(slurm.setup),
            f'  ray start --head --node-ip-address="$head_ip" --port={RAY_PORT} --num-gpus={gpus} '
            f"--dashboard-port={DASHBOARD_PORT} --disable-usage-stats",
            f'  {shlex.join(again)} --set cluster.ray_address=http://"$head_ip":{DASHBOARD_PORT} '
            '--set cluster.master_addr="$head_ip"',
            "}",
            "on_worker() {",
            "  set -e",
            *_lines(slurm.setup),
            "  # the head may still be starting: one attempt is not enough",
            f'  until ray start --address="$head_ip":{RAY_PORT} --num-gpus={gpus} --disable-usage-stats --block; do',
            "    sleep 5",
            "  done",
            "}",
            "export -f on_head on_worker",
            "",
            'for node in "${nodes[@]:1}"; do',
            f'  {srun} -w "$node" bash -c on_worker &',
            "done",
            f'{srun} -w "${{nodes[0]}}" bash -c on_head || code=$?',
            "# ends the workers with the job, whatever became of the head",
            'scancel "$SLURM_JOB_ID"',
            'exit "${code:-0}"',
            "",
        ]
    )


def _lines(setup: str) -> list[str]:
    return [f"  {line}" for line in setup.strip().splitlines()]
