"""Runs that SIGKILL themselves at the n-th time that they make something durable, and are then resumed to the end.

``python -m tests.endtoend.killed_at FOLDER POINTS SETTING…`` makes the undisturbed run ``FOLDER/whole``, then one run
``FOLDER/at-N`` for each of POINTS moments that are spread over the undisturbed run's. Each run is a fork of this
process, so that its imports are paid once.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from termrl.config import TrainConfig
from termrl.errors import RunError
from termrl.runs.store import RunStore
from termrl.settings import load_settings, to_toml
from termrl.training.events import Silent
from termrl.training.local import prepare, train

_IMPORTED_ONCE = (
    "openai",
    "pyarrow.parquet",
    "termrl.capture.render",
    "termrl.capture.server",
    "termrl.engine.transformers",
    "termrl.training.grpo",
    "termrl.training.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "uvicorn.protocols.http.auto",
)


def work(run: Path, config: TrainConfig) -> None:
    """Begin the run, or go on with it."""
    torch.set_num_threads(1)
    model, pools = prepare(config)
    try:
        store, resume = RunStore.resume(run), True
    except RunError:
        store, resume = RunStore.create(run, given="", resolved=to_toml(config)), False
    with store:
        asyncio.run(train(config, store, Silent(), model=model, pools=pools, resume=resume))


def in_fork(body: Callable[[], None]) -> int:
    """The wait status of a fork that does ``body``."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    """See the module."""
    folder, points = Path(sys.argv[1]), int(sys.argv[2])
    config = load_settings(TrainConfig, flags=sys.argv[3:]).config
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    fsync, calls = os.fsync, 0

    def counting(kill_at: int | None, report: int | None = None) -> Callable[[int], None]:
        def counted(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if report is not None:
                os.pwrite(report, str(calls).encode(), 0)
            fsync(descriptor)

        return counted

    count = os.memfd_create("count")

    def whole() -> None:
        os.fsync = counting(None, count)
        work(folder / "whole", config)

    if in_fork(whole) != 0:
        raise SystemExit("the undisturbed run failed")
    total = int(os.pread(count, 20, 0))
    print(total, flush=True)
    for point in range(points):
        at = 1 + point * (total - 1) // max(1, points - 1)
        run = folder / f"at-{at}"

        def killed(at: int = at, run: Path = run) -> None:
            os.fsync = counting(at)
            work(run, config)

        def resumed(run: Path = run) -> None:
            work(run, config)

        statuses = in_fork(killed), in_fork(resumed)
        print(at, *statuses, flush=True)


if __name__ == "__main__":
    main()
