"""95% confidence intervals for a mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

NORMAL_QUANTILE = 1.959964
"""The 97.5% quantile of the normal distribution."""


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% confidence interval for the mean of `values`.

    Uses Wilson's score interval if all values are 0 or 1, since it is also valid near 0 and 1.
    Otherwise uses Student's t. The interval is infinite if there are too few values.
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
    return student_t_interval(values)


def student_t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's 95% interval for the mean of `values`. One value gives an infinite one."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    half = _student_t_quantile(len(values) - 1) * spread / math.sqrt(len(values))
    return mean - half, mean + half


def _student_t_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t, from an expansion that is accurate to 2%."""
    exact = {1: 12.7062, 2: 4.30265}
    if freedom in exact:
        return exact[freedom]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
