"""Estimating how often a policy solves tasks, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
INTERVAL = "Wilson score interval at 95 %, with the tasks as the sample"

_Z = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """A rate in [0, 1] and its confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of ``k`` attempts passes, unbiased, from ``n`` attempts of which ``c`` passed.

    1 - C(n-c, k) / C(n, k): Chen et al., Evaluating Large Language Models Trained on Code (arXiv:2107.03374).

    Raises:
        ValueError: unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} in {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(rate: float, n: int) -> tuple[float, float]:
    """The Wilson score interval of a mean over ``n`` ≥ 1 independent values in [0, 1].

    Exact in form for values that are 0 or 1; for others, whose variance is smaller, it is wider than it had to be.
    Never empty and never outside [0, 1], also where all or none passed (Wilson, J. Am. Stat. Assoc. 22, 1927).
    """
    z2 = _Z * _Z
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    low = 0.0 if rate == 0.0 else max(0.0, centre - half)
    high = 1.0 if rate == 1.0 else min(1.0, centre + half)
    return low, high


def estimates(counts: Sequence[tuple[int, int]]) -> dict[int, Estimate]:
    """pass@1 … pass@k over tasks, given as (attempts with a verdict, passes) each.

    Tasks without a verdict are left out; k goes up to the attempts of the task that has the fewest of the others.
    The sample is the tasks, not the attempts: attempts at one task are not independent of each other.
    """
    counted = [(n, c) for n, c in counts if n > 0]
    if not counted:
        return {}
    found: dict[int, Estimate] = {}
    for k in range(1, min(n for n, _ in counted) + 1):
        value = math.fsum(pass_at_k(n, c, k) for n, c in counted) / len(counted)
        found[k] = Estimate(value, *wilson(value, len(counted)))
    return found
