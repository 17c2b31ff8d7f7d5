"""Who may come in: sessions are admitted by slots and by the memory that their tasks may use."""

from __future__ import annotations

from termrl.errors import CapacityError


class Admission:
    """Counts slots and memory. A lease is given back when its sandbox is gone, and not before.

    Attributes:
        refused: how often somebody was turned away, by what ran out.
    """

    def __init__(self, *, max_sessions: int, max_memory_mb: int) -> None:
        self.max_sessions = max_sessions
        self.max_memory_mb = max_memory_mb
        self.active = 0
        self.memory_mb = 0
        self.refused = {"sessions": 0, "memory": 0}

    def lease(self) -> Lease:
        """Take a slot.

        Raises:
            CapacityError: all are taken.
        """
        if self.active >= self.max_sessions:
            raise CapacityError(
                f"all {self.max_sessions} sessions are taken", hint="wait for one to end, or raise --max-sessions"
            )
        self.active += 1
        return Lease(self)


class Lease:
    """One session's slot and the memory that its sandbox may use. Made by :meth:`Admission.lease` only."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._memory_mb = 0
        self._held = True

    def need(self, memory_mb: int) -> None:
        """Hold so much memory from now on, instead of what was held.

        Raises:
            CapacityError: it does not fit; what was held is still held.
        """
        if memory_mb and not self._held:
            raise CapacityError("the session has ended")
        admission = self._admission
        total = admission.memory_mb - self._memory_mb + memory_mb
        if memory_mb > self._memory_mb and total > admission.max_memory_mb:
            raise CapacityError(
                f"{memory_mb} MiB do not fit: {admission.memory_mb} of {admission.max_memory_mb} MiB are taken",
                hint="wait for a session to end, or raise --max-memory-mb",
            )
        admission.memory_mb = total
        self._memory_mb = memory_mb

    def release(self) -> None:
        """Give slot and memory back. Idempotent."""
        if self._held:
            self.need(0)
            self._held = False
            self._admission.active -= 1
