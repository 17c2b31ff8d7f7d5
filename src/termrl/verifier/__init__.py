"""Verdicts: running a task's own tests in a sandbox and saying what they said.

``causes`` holds the closed lists, ``verdict`` the nouns, ``outcomes`` the way to a reward. ``verify`` runs the tests in
the ``surroundings`` they get; ``reward`` and ``bootstrap`` read what they left. ``tamper`` looks at what the policy
left, ``signals`` names it, ``rules`` and ``cleanroom`` act on it. ``attribution`` decides whose fault a missing verdict
is, ``oracle`` is the golden check, ``metrics`` counts.
"""

from termrl.verifier.causes import POLICY_CAUSES, Cause, EndReason
from termrl.verifier.rules import VerifyRules
from termrl.verifier.signals import Signal
from termrl.verifier.verdict import Attribution, CleanRoom, Finding, Outcome, Verdict

__all__ = [
    "POLICY_CAUSES",
    "Attribution",
    "Cause",
    "CleanRoom",
    "EndReason",
    "Finding",
    "Outcome",
    "Signal",
    "Verdict",
    "VerifyRules",
]
