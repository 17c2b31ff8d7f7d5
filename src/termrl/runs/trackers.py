"""Experiment trackers: a run's figures sent to Weights & Biases, TensorBoard or Trackio as they are recorded.

A tracker is a convenience: ``metrics.jsonl`` has every figure. So whatever is wrong before the run starts is an
error, and whatever fails later is one warning. All calls into a tracker's library happen on a thread of its own,
behind a bounded queue: a slow or dead server holds nothing up.

Credentials are the libraries' own business (``WANDB_API_KEY``, ``~/.netrc``, ``HF_TOKEN``); no setting holds one.
"""

from __future__ import annotations

import importlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from termrl.config import TrainConfig
from termrl.errors import ConfigError, RunError
from termrl.runs.files import write_new
from termrl.runs.metrics import EvalScores, eval_metrics
from termrl.training.events import Silent

if TYPE_CHECKING:
    from termrl.evaluation.config import EvalConfig

OPEN_S = 120.0
CLOSE_S = 30.0
QUEUED = 1000

_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
_NOT_SENT: dict[str, Any] = {"run_dir": True, "track": True, "sandbox": {"settings"}}


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run when it opens.

    Attributes:
        folder: the run folder.
        project: what the tracker files the run under.
        config: the resolved settings, as JSON.
        resumed: the run goes on after it stopped; its earlier figures have been sent already.
    """

    folder: Path
    project: str
    config: Mapping[str, Any]
    resumed: bool = False

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """One open tracker. Called from one thread; may block, may raise."""

    def begin(self, first_step: int) -> None:
        """Training steps from ``first_step`` on follow; what was sent for them before is void."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record figures at a step, which never goes down except after :meth:`begin`."""
        ...

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Send what is left. ``summary`` is the run's, or ``None`` when it failed or was interrupted."""
        ...


class WandbTracker:
    """Weights & Biases; its files are in ``wandb/`` of the run folder. ``WANDB_MODE=offline`` sends nothing.

    A resumed run goes on under the same id. Figures are drawn over ``step`` and steps that a resumed run does again
    are drawn again.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=_wandb_id(run.folder / "wandb" / "termrl-run-id"),
            dir=str(run.folder),
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(console="off", save_code=False, init_timeout=OPEN_S / 2),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def begin(self, first_step: int) -> None:
        """Nothing to do."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({"step": step, **values})

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Marks the run as failed unless there is a summary."""
        for name, value in (summary or {}).items():
            if isinstance(value, str | int | float):
                self._run.summary[name] = value
        self._run.finish(exit_code=0 if summary is not None else 1)


class TensorBoardTracker:
    """Event files in ``tensorboard/`` of the run folder; ``tensorboard --logdir runs`` shows all runs."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if not run.resumed:
            self._add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```")

    def begin(self, first_step: int) -> None:
        """A session start, at which TensorBoard forgets the points from ``first_step`` on."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportMissingImports]

        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One event with a scalar per figure, on disk when this returns."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=Summary(value=points))

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Closes the file."""
        self._writer.close()

    def _add_text(self, tag: str, markdown: str) -> None:
        """A text of the Text tab. Built by hand: the library's own builder imports tensorflow."""
        from tensorboard.compat.proto.summary_pb2 import (  # pyright: ignore[reportMissingImports]
            Summary,
            SummaryMetadata,
        )
        from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportMissingImports]

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        self._add(step=0, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]

        self._writer.add_event(Event(wall_time=time.time(), **fields))
        self._writer.flush()


class TrackioTracker:
    """Trackio: local files in ``TRACKIO_DIR`` (default: the Hugging Face cache), or a Space if its variables say so.

    A resumed run continues the newest run of the same name in the project.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=run.project,
            name=run.name,
            config=dict(run.config),
            resume="allow" if run.resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def begin(self, first_step: int) -> None:
        """Nothing to do."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Waits for its own sender."""
        self._run.finish()


_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
}


def check_tracker(name: str) -> None:
    """Refuse, before anything is made, a tracker that cannot work: package missing, or no credentials.

    Raises:
        ConfigError: with what to do.
    """
    if name == "none":
        return
    package = _PACKAGES[name]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"track.to: {name} needs the package {package}, which cannot be imported: {error}",
            hint=f"pip install 'termrl[{name}]'",
        ) from None
    if name == "wandb":
        _check_wandb_login(module)


@contextmanager
def tracking(
    config: TrainConfig | EvalConfig, folder: Path, *, resumed: bool, warn: Callable[[str], None]
) -> Iterator[list[TrackerWatcher]]:
    """Open the tracker that ``track.to`` names for the run in ``folder``; no watcher where it is ``none``.

    Args:
        warn: takes one line for the user; may be called from another thread.

    Raises:
        RunError: the tracker does not open.
    """
    name = config.track.to
    if name == "none":
        yield []
        return
    sent = config.model_dump(mode="json", exclude=_NOT_SENT)
    run = TrackedRun(folder, config.track.project, sent, resumed)
    with TrackerWatcher(name, lambda: _TRACKERS[name](run), warn=warn) as watcher:
        yield [watcher]


class TrackerWatcher(Silent):
    """Sends steps and evaluations to a tracker. Use as a context manager around the run.

    Args:
        name: the tracker's, for messages.
        connect: opens it; called on the tracker's thread.
        warn: takes one line for the user.
        open_s, close_s: how long opening and closing may take.

    Raises:
        RunError: on entering, if the tracker does not open.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Tracker],
        *,
        warn: Callable[[str], None],
        open_s: float = OPEN_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._name = name
        self._connect = connect
        self._warn = warn
        self._open_s, self._close_s = open_s, close_s
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUED)
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._given = self._sent = 0
        self._warned = False
        self._step = 0
        self._summary: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        hint = 'metrics.jsonl has every figure without a tracker: --track none; for wandb, WANDB_MODE="offline"'
        try:
            self._opened.result(self._open_s)
        except TimeoutError:
            raise RunError(f"{self._name}: did not open within {self._open_s:g} s", hint=hint) from None
        except Exception as error:
            raise RunError(f"{self._name}: does not open: {_line(error)}", hint=hint) from error
        return self

    def __exit__(self, *exc: object) -> None:
        summary = self._summary
        self._put(lambda tracker: tracker.close(summary))
        deadline = time.monotonic() + self._close_s
        try:
            self._calls.put(None, timeout=self._close_s)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        lost = self._given - self._sent
        if self._thread.is_alive():
            self._warn(f"{self._name}: has not closed within {self._close_s:g} s and is left; metrics.jsonl is whole")
        elif lost:
            self._warn(f"{self._name}: {lost} of {self._given} calls failed; metrics.jsonl is whole")

    def started(self, run: Path, *, steps: int, first_step: int) -> None:
        """Tell the tracker where the run goes on."""
        self._put(lambda tracker: tracker.begin(first_step))

    def phase(self, name: str, *, step: int, total: int) -> None:
        """Note the step, for evaluations."""
        self._step = step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's figures."""
        self._log(step, metrics)

    def evaluated(self, name: str, scores: EvalScores) -> None:
        """Send an evaluation's figures, at the step after which it was made."""
        self._log(self._step, eval_metrics(scores))

    def finished(self, summary: Mapping[str, Any], rewards: Mapping[int, float]) -> None:
        """The run came to its end."""
        self._summary = summary

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._put(lambda tracker: tracker.log(step, values))

    def _put(self, call: Callable[[Tracker], None]) -> None:
        self._given += 1
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._warn_once("takes nothing any more")

    def _work(self) -> None:
        try:
            tracker = self._connect()
        except BaseException as error:  # SystemExit too: it would end this thread in silence
            self._opened.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            return
        self._opened.set_result(None)
        while (call := self._calls.get()) is not None:
            try:
                call(tracker)
            except BaseException as error:
                self._warn_once(f"failed, the run goes on: {_line(error)}")
            else:
                self._sent += 1

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{self._name}: {message}")


def _check_wandb_login(wandb: Any) -> None:
    """Log in now where a login is needed, so that its question or refusal comes before the run's first file."""
    if wandb.setup().settings.mode not in ("online", "run", "shared"):
        return
    try:
        known = wandb.login(verify=False)
    except Exception as error:
        known, why = False, _line(error)
    else:
        why = "no API key"
    if not known:
        raise ConfigError(
            f"track.to: wandb: {why}",
            hint="wandb login, or WANDB_API_KEY in the environment; WANDB_MODE=offline needs neither",
        )


def _wandb_id(path: Path) -> str:
    """The run's id, made once and kept with the run's wandb files."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        write_new(path, uuid.uuid4().hex[:16].encode())
    return path.read_text(encoding="ascii")


def _line(error: BaseException) -> str:
    """An error of a library in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
