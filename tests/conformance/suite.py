"""One run of the conformance suite for a whole module of tests, each of which says how one check went."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from termrl.sandboxes.conformance import Check, Outcome, Subject, run_checks

AT_ONCE = 4


class Suite:
    """Checks that run on the module's event loop while its tests wait."""

    def __init__(self, subject: Subject, checks: Sequence[Check]) -> None:
        loop = asyncio.get_running_loop()
        self._outcomes: dict[str, asyncio.Future[Outcome]] = {check.name: loop.create_future() for check in checks}
        self._running = loop.create_task(self._run(subject, checks))

    async def holds(self, check: Check) -> None:
        """Fail or skip the test as the check says."""
        waiting = self._outcomes[check.name]
        await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await self._running
        outcome = waiting.result()
        if outcome.state == "skipped":
            pytest.skip(outcome.detail)
        assert outcome.state == "holds", f"{check.what}: {outcome.detail}"

    async def stop(self) -> None:
        """End what still runs."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, subject: Subject, checks: Sequence[Check]) -> None:
        async for outcome in run_checks(subject, checks, at_once=AT_ONCE):
            self._outcomes[outcome.check.name].set_result(outcome)


def chosen(request: pytest.FixtureRequest) -> list[Check]:
    """The checks whose tests in this module were asked for, each once."""
    found = [item.callspec.params["check"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    return list(dict.fromkeys(found))
