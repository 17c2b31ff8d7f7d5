"""Validation: every task's own solution must score 1 and doing nothing 0, each time, before anyone trains on it.

``records`` holds the nouns, ``study`` runs the attempts and retries what the machine failed, ``judge`` says what they
show about a task, ``journal`` keeps attempts as they come, ``gate`` holds a run's tasks against reports.
"""

from termrl.validation.records import Attempt, Report, Status, TaskReport

__all__ = ["Attempt", "Report", "Status", "TaskReport"]
