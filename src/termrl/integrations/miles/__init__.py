"""miles: what it calls for each sample, selected by import path; ``miles`` itself is neither imported nor changed.

``run`` is the agent function (``--custom-agent-function-path``) with ``abort`` as its sibling, ``reward_func`` the
reward (``--custom-rm-path``), ``keep_group`` a filter of groups (``--dynamic-sampling-filter-path``), ``log_rollout``
and ``log_eval`` what reports agent metrics. ``settings`` says what they read from the environment, for each episode
anew; ``rows`` writes prompt data.
"""

from __future__ import annotations

from termrl.integrations.miles.agent import abort, run
from termrl.integrations.miles.groups import keep_group
from termrl.integrations.miles.report import log_eval, log_rollout
from termrl.integrations.miles.reward import reward_func

__all__ = ["abort", "keep_group", "log_eval", "log_rollout", "reward_func", "run"]
