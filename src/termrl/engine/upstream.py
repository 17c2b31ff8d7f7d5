"""The embedded engine behind :class:`termrl.capture.upstreams.Upstream`: one thread, one batch at a time.

In lock-step, the order keys of the live episodes are entered at the gate; a batch starts when every one of them has a
call waiting, so the rows of a batch, and with them every float, depend on the episodes alone and not on timing. Calls
that come while nobody is entered are gathered for a moment and batched.

In the continuous schedule there is one batch that never ends: a call joins it between two of its decode steps, and its
result is handed over as soon as its own turn is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from termrl.capture.upstreams import GenerateRequest, GenerateResult
from termrl.errors import PolicyError, TermrlError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from termrl.engine.running import Ended, RunningBatch
    from termrl.engine.transformers import EmbeddedEngine

Schedule = Literal["lockstep", "continuous"]
T = TypeVar("T")


class _Call:
    """One waiting or running :meth:`EmbeddedUpstream.generate`."""

    def __init__(self, request: GenerateRequest, future: asyncio.Future[GenerateResult]) -> None:
        self.request = request
        self.future = future
        self.cancelled = threading.Event()
        self.made = time.monotonic()


class EmbeddedUpstream:
    """Serves the engine to one event loop.

    Args:
        engine: the engine; nothing else may call it while this object is open, save through it.
        schedule: ``lockstep`` waits for every entered episode; in ``continuous`` a call joins the running batch.
        gather_s: how long a lock-step batch waits for company where the gate does not decide.
    """

    def __init__(self, engine: EmbeddedEngine, schedule: Schedule = "lockstep", *, gather_s: float = 0.005) -> None:
        self.engine = engine
        self.schedule = schedule
        self.model_name = engine.model_name
        self.context_window = engine.context_window
        self._gather_s = gather_s
        self._entered: Counter[int] = Counter()
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._timer: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="termrl-engine")
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._batch: RunningBatch | None = None  # continuous only, as are the next four
        self._decoding = False
        self._lock = threading.Lock()  # guards _waiting, _running and _between, which the engine's thread changes
        self._between: list[Callable[[], None]] = []
        self._draining = 0

    # -- the gate -----------------------------------------------------------------------------------------------

    def enter(self, order: int) -> None:
        """An episode starts: from now on no lock-step batch begins without a call of this order.

        Enter all episodes of a phase before the first of them calls; else the first batch depends on timing.
        """
        self._entered[order] += 1
        self._consider()

    def leave(self, order: int) -> None:
        """An episode ended; the others no longer wait for it. Leaving more often than entering does nothing."""
        if self._entered[order] <= 1:
            del self._entered[order]
        else:
            self._entered[order] -= 1
        self._consider()

    def _ready(self) -> bool:
        if not self._entered:
            return False
        waiting = Counter(call.request.order for call in self._waiting)
        return all(waiting[order] >= count for order, count in self._entered.items())

    def _consider(self) -> None:
        """Start a batch, or the timer that will, if the engine is free and calls wait."""
        if self._decoding or self._running or not self._waiting or self._closed:
            return
        if self.schedule == "continuous":
            if not self._draining:
                self._start_continuous()
        elif self._ready():
            self._start()
        elif not self._entered and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._gather_s, self._gathered)

    def _gathered(self) -> None:
        self._timer = None
        if self._waiting and not self._running and not self._entered:
            self._start()
        else:
            self._consider()

    # -- calls --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn. Cancelling the call takes its row out of the batch and leaves the others alone.

        Raises:
            PolicyError: the request is malformed, the engine failed, or it was closed.
        """
        if self._closed:
            raise PolicyError("the embedded engine is closed")
        self.engine.check(request)  # a bad request fails alone, not with its batch
        # a copy, so that two calls with one request object stay two rows
        call = _Call(dataclasses.replace(request), asyncio.get_running_loop().create_future())
        with self._lock:
            self._waiting.append(call)
        self._consider()
        try:
            return await call.future
        finally:
            call.cancelled.set()
            with self._lock:
                if call in self._waiting:
                    self._waiting.remove(call)

    async def release(self, session_id: str) -> None:
        """Forget what is cached for a session, once calls that were cancelled before are out of the way. Idempotent."""
        if self._closed:
            return
        if self.schedule == "continuous":
            await self._between_steps(self.engine.release, session_id)
        else:
            await self._call(self.engine.release, session_id)

    async def set_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Renew the engine's weights between batches; in ``continuous``, later calls wait until the earlier have ended.

        Raises:
            ModelError: an unknown name or a wrong shape.
        """
        self._draining += 1
        try:
            await self._call(self.engine.set_weights, tensors, version)
        finally:
            self._draining -= 1
            self._consider()

    async def aclose(self) -> None:
        """End every call with :class:`PolicyError` and the thread with the running batch. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            calls = [*self._waiting, *self._running]
        for call in calls:
            call.cancelled.set()
            _fail(call, PolicyError("the embedded engine was closed"))
        await asyncio.gather(*self._tasks)
        await asyncio.to_thread(self._thread.shutdown)
        if self._batch is not None:
            self._batch.close()

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run in the engine's thread, after what is queued there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._running, self._waiting = sorted(self._waiting, key=lambda call: call.request.order), []
        self._spawn(self._run(self._running))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, calls: list[_Call]) -> None:
        try:
            results = await self._call(self._generate, calls)
            for call, result in zip(calls, results, strict=True):
                if not call.future.done():
                    call.future.set_result(result)
        except Exception as error:  # whatever the engine raised ends every call of the batch, with its reason
            self._fail_all(calls, error)
        finally:
            self._running = []
            # the ended calls' episodes get a chance to leave or call again before the gate is looked at
            asyncio.get_running_loop().call_soon(self._consider)

    def _generate(self, calls: list[_Call]) -> list[GenerateResult]:
        by_request = {id(call.request): call for call in calls}
        begun = time.monotonic()
        results = self.engine.generate(
            [call.request for call in calls],
            cancelled=lambda request: by_request[id(request)].cancelled.is_set(),
        )
        ended = time.monotonic()
        # the rows share one machine: a turn's service is its share, so that a wall cap means the same in any batch
        share = (ended - begun) / len(calls)
        return [
            replace(result, service_s=share, queue_s=max(0.0, ended - call.made - share))
            for call, result in zip(calls, results, strict=True)
        ]

    def _fail_all(self, calls: list[_Call], error: Exception) -> None:
        """End ``calls`` and all that wait with what the engine raised."""
        reason = error.message if isinstance(error, TermrlError) else f"{type(error).__name__}: {error}"
        with self._lock:
            calls = [*calls, *self._waiting]
        for call in calls:
            failure = PolicyError(f"the embedded engine failed: {reason}")
            failure.__cause__ = error
            _fail(call, failure)

    # -- the continuous schedule --------------------------------------------------------------------------------

    def _start_continuous(self) -> None:
        self._decoding = True
        self._spawn(self._run_continuous())

    async def _run_continuous(self) -> None:
        """Decode until no call is left."""
        loop = asyncio.get_running_loop()
        try:
            await self._call(self._decode, loop)
        except Exception as error:
            self._fail_all(self._running, error)
            if self._batch is not None:
                self._batch.close()
            self._batch = None  # its rows are in no known state
        finally:
            self._decoding, self._running = False, []
            for task in self._take_between():  # what came after the last step
                task()
            loop.call_soon(self._consider)

    def _decode(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the engine's thread: step after step, as long as there are calls."""
        by_request: dict[int, _Call] = {}
        if self._batch is None:
            self._batch = self.engine.running_batch()
        batch = self._batch
        batch.cancelled = lambda request: by_request[id(request)].cancelled.is_set()
        while True:
            if not self._draining and not self._closed:
                calls = self._take()
                by_request |= {id(call.request): call for call in calls}
                batch.join([call.request for call in calls])
            if not batch.rows:
                return
            tasks = self._take_between()
            for ended in batch.step():
                call = by_request.pop(id(ended.request))
                with self._lock:
                    self._running.remove(call)
                loop.call_soon_threadsafe(_deliver, call, ended, self.engine.policy_version)
            for task in tasks:  # asked for before the step, which has put the calls out that were cancelled by then
                task()

    def _take(self) -> list[_Call]:
        """What waits, in order; it is running now."""
        with self._lock:
            taken, self._waiting = sorted(self._waiting, key=lambda call: call.request.order), []
            self._running = [*self._running, *taken]
        return taken

    def _take_between(self) -> list[Callable[[], None]]:
        with self._lock:
            tasks, self._between = self._between, []
        return tasks

    async def _between_steps(self, function: Callable[[str], None], argument: str) -> None:
        """Run in the engine's thread between two decode steps, or at once where nothing is decoded."""
        if not self._decoding:
            await self._call(function, argument)
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def task() -> None:
            function(argument)
            loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(None))

        with self._lock:
            self._between.append(task)
        await done


def _deliver(call: _Call, ended: Ended, version: int) -> None:
    if not call.future.done():
        waited = max(0.0, time.monotonic() - call.made - ended.service_s)
        call.future.set_result(
            GenerateResult(ended.token_ids, ended.logprobs, ended.reason, version, ended.service_s, waited)
        )


def _fail(call: _Call, error: PolicyError) -> None:
    if not call.future.done():
        call.future.set_exception(error)
