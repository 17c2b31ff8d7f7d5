"""What the verdicts of one step say beyond their rewards: signals, attribution and what looking into them cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from termrl.verifier.signals import count_signals
from termrl.verifier.verdict import Verdict


def verdict_metrics(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """Counts over the step's verdicts; a name stands here only if it came up.

    ``verify/signals/<name>``: verdicts with that signal. ``verify/attributed/<finding>``: missing verdicts that were
    looked into. ``verify/clean_room/<outcome>``: passes that were re-checked. ``verify/extra_runs``: runs of tests
    beyond the first; ``perf/verify_extra_s``: the seconds that they took, sandboxes included, summed over episodes.
    """
    found = list(verdicts)
    metrics: dict[str, float] = {}
    for name, count in count_signals(verdict.signals for verdict in found).items():
        metrics[f"verify/signals/{name}"] = count
    attributions = [verdict.attribution for verdict in found if verdict.attribution is not None]
    for finding, count in sorted(Counter(str(each.finding) for each in attributions).items()):
        metrics[f"verify/attributed/{finding}"] = count
    rooms = [verdict.clean_room for verdict in found if verdict.clean_room is not None]
    for outcome, count in sorted(Counter(str(room.outcome) for room in rooms).items()):
        metrics[f"verify/clean_room/{outcome}"] = count
    extra_runs = sum(verdict.attempts - 1 for verdict in found)
    if extra_runs:
        metrics["verify/extra_runs"] = extra_runs
        metrics["perf/verify_extra_s"] = sum(each.seconds for each in [*attributions, *rooms])
    return metrics
