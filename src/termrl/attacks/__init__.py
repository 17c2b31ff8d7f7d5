"""What a policy could do to be paid without solving its task, as data, and what runs it against any task.

``attack`` holds the nouns, ``forging``, ``tooling``, ``python`` and ``hostile`` the attacks, ``suite`` the list of them
all. ``running`` runs them through environment, verifier and attribution, exactly as in training.
"""

from termrl.attacks.attack import Attack, Group
from termrl.attacks.running import AttackResult, TaskProof, prove
from termrl.attacks.suite import ATTACKS, chosen

__all__ = ["ATTACKS", "Attack", "AttackResult", "Group", "TaskProof", "chosen", "prove"]
