"""Verdicts: running a task's own tests in a sandbox and saying what they said.

``verdict`` holds the nouns, ``outcomes`` the reward table, ``verify`` runs the tests, ``reward`` and ``bootstrap``
read what they left, ``attribution`` decides whose fault a missing verdict is, ``oracle`` is the golden check.
"""

from termrl.verifier.verdict import POLICY_CAUSES, Attribution, Cause, EndReason, Finding, Outcome, Verdict

__all__ = ["POLICY_CAUSES", "Attribution", "Cause", "EndReason", "Finding", "Outcome", "Verdict"]
