"""95% confidence intervals of a mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

NORMAL_QUANTILE = 1.959964
"""The 97.5% quantile of the normal distribution."""


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the confidence interval of the mean of `values`.

    Values of 0 and 1 use Wilson's score, which also works at the ends; other numbers use Student's
    t. The interval is infinite where the values say nothing.
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
    """Return the 97.5% quantile of Student's t, by an expansion that is within 2%."""
    exact = {1: 12.7062, 2: 4.30265}
    if freedom in exact:
        return exact[freedom]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
