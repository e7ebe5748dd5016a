"""Confidence intervals: known values and coverage."""

from __future__ import annotations

import math
import statistics

import pytest

from sightline.run.confidence import confidence_interval


def test_success_rates_use_the_wilson_interval() -> None:
    # 8 of 10; R: binom::binom.wilson(8, 10).
    assert confidence_interval([1.0] * 8 + [0.0] * 2) == pytest.approx(
        (0.4901625, 0.9433178), abs=1e-5
    )
    low, high = confidence_interval([1.0] * 20)
    assert high == 1.0 and low == pytest.approx(0.8388748, abs=1e-5)


@pytest.mark.parametrize(("count", "t"), [(2, 12.7062), (5, 2.7764), (11, 2.2281), (101, 1.9840)])
def test_other_metrics_use_the_student_t_interval(count: int, t: float) -> None:
    values = [float(i * i % 7) + 0.5 for i in range(count)]
    low, high = confidence_interval(values)
    half = t * statistics.stdev(values) / math.sqrt(count)
    assert (high - low) / 2 == pytest.approx(half, rel=0.02)
    assert (high + low) / 2 == pytest.approx(statistics.fmean(values))
