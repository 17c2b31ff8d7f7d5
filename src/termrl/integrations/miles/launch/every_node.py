"""Run one command on the first nodes of the Ray cluster at once: ``python -m … --nodes N -- command``.

In the command ``{node_rank}`` and ``{master_addr}`` stand for the node's number and the address of node 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run it; returns the first exit code that is not 0."""
    if len(argv) < 4 or argv[0] != "--nodes" or argv[2] != "--":
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    return run(int(argv[1]), argv[3:])


def run(count: int, command: Sequence[str]) -> int:
    """Run ``command`` on ``count`` nodes, this one first."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

    ray.init(address="auto")
    here = ray.util.get_node_ip_address()
    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeManagerAddress"] != here, node["NodeManagerAddress"], node["NodeID"]),
    )[:count]
    if len(nodes) < count:
        print(f"{count} nodes are needed, the Ray cluster has {len(nodes)}", file=sys.stderr)
        return 1
    execute = ray.remote(num_cpus=0.001, max_retries=0)(_execute)
    waiting = []
    for rank, node in enumerate(nodes):
        words = filled(command, rank=rank, master=nodes[0]["NodeManagerAddress"])
        there = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        waiting.append(execute.options(scheduling_strategy=there).remote(words))
    return next((code for code in ray.get(waiting) if code), 0)


def filled(command: Sequence[str], *, rank: int, master: str) -> list[str]:
    """The command of one node."""
    return [word.replace("{node_rank}", str(rank)).replace("{master_addr}", master) for word in command]


def _execute(words: list[str]) -> int:
    # Ray hides the GPUs from tasks that reserve none
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(words, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
