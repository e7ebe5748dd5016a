"""How far a mean over a sample can be from the mean over everything: 95% confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

NORMAL_QUANTILE = 1.959964
"""97.5% of a normal distribution lies below it."""


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean of `values`; no narrower than what is known of one value: everything.

    Successes and failures by Wilson's score, which holds at 0 and at 1 too; other numbers by
    Student's t.
    """
    if not values:
        return -math.inf, math.inf
    mean, count = statistics.fmean(values), len(values)
    if all(value in (0.0, 1.0) for value in values):
        spread = NORMAL_QUANTILE**2 / count
        middle = (mean + spread / 2) / (1 + spread)
        variance = mean * (1 - mean) / count + spread / (4 * count)
        half = NORMAL_QUANTILE / (1 + spread) * math.sqrt(variance)
        return max(0.0, middle - half), min(1.0, middle + half)
    if count == 1:
        return -math.inf, math.inf
    half = _student_t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean - half, mean + half


def _student_t_quantile(freedom: int) -> float:
    """97.5% of Student's t lies below it, by the expansion around the normal; to 2% from 3 on."""
    few = {1: 12.7062, 2: 4.30265}
    if freedom in few:
        return few[freedom]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
