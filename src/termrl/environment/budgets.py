"""How long a call into an environment may take: the budgets it was given or told, and always some time more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from termrl.environment.protocol import Action
from termrl.verifier.attribution import UNTOUCHED_RUNS

_VERIFY_S = 900.0
_EXEC_S = 60.0


def seconds(value: object) -> float | None:
    """``value`` as a positive, finite number of seconds, else ``None``."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None


@dataclass(frozen=True)
class Budgets:
    """What an environment's calls may take, in seconds.

    Attributes:
        reset_s: a reset.
        grace_s: what a call may take beyond its own budget.
        command_s: one command; ``None`` where nobody said.
        verify_s: one run of the tests; ``None`` where nobody said.
    """

    reset_s: float = 600.0
    grace_s: float = 60.0
    command_s: float | None = None
    verify_s: float | None = None

    def told(self, info: Mapping[str, Any]) -> Budgets:
        """With what a reset's ``info`` says; a budget is never made smaller by it."""
        return replace(
            self,
            command_s=_most(self.command_s, info.get("command_timeout_s")),
            verify_s=_most(self.verify_s, info.get("verifier_timeout_sec")),
        )

    def once(self, action: Action) -> float:
        """The bound of one action whose tests run once: above every budget that may hold for it."""
        if action.action_type == "evaluate":
            return (_most(self.verify_s, action.wait_seconds) or _VERIFY_S) + self.grace_s
        command_s = self.command_s or _EXEC_S
        return (_most(command_s, action.wait_seconds) or command_s) + self.grace_s

    def of(self, action: Action) -> float:
        """The bound of one action: an environment asks for a missing verdict again, and in untouched sandboxes."""
        one = self.once(action)
        return 2 * one + UNTOUCHED_RUNS * (one + self.reset_s) if action.action_type == "evaluate" else one


def _most(known: float | None, value: object) -> float | None:
    other = seconds(value)
    return known if other is None else other if known is None else max(known, other)
