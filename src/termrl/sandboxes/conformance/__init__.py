"""The conformance suite: what every sandbox backend must do, run against a real provider.

``check`` holds the nouns and the runner; ``execs``, ``output``, ``files``, ``limits``, ``isolation`` and ``leaks`` hold
the checks, one function each. ``termrl doctor --sandbox NAME`` runs them, and so do the tests; a backend of your own
runs :func:`run_checks` on a :class:`Subject` made of its provider.
"""

from __future__ import annotations

from termrl.sandboxes.conformance import execs, files, isolation, leaks, limits, output
from termrl.sandboxes.conformance.check import Check, Failure, Outcome, Subject, run_checks

CHECKS: tuple[Check, ...] = (
    *execs.section.checks,
    *output.section.checks,
    *files.section.checks,
    *limits.section.checks,
    *isolation.section.checks,
    *leaks.section.checks,
)

__all__ = ["CHECKS", "Check", "Failure", "Outcome", "Subject", "run_checks"]
