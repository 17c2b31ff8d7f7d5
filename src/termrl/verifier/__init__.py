"""Verdicts: running a task's own tests in a sandbox and saying what they said.

``verdict`` holds the nouns and the reward table, ``verify`` runs the tests, ``attribution`` decides
whose fault a missing verdict is.
"""

from termrl.verifier.verdict import POLICY_CAUSES, Cause, EndReason, Outcome, Verdict

__all__ = ["POLICY_CAUSES", "Cause", "EndReason", "Outcome", "Verdict"]
