"""What a step measures of itself: sums that are read at once, and seconds by their use."""

from __future__ import annotations

import torch

from sightline.trainer.step_result import MetricSums, StepTimer


def test_sums_are_those_of_numbers_read_one_by_one() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(n) for n in (3, 1000, 17)]
    metric_sums, one_by_one = MetricSums(["loss", "tokens", "none"]), 0.0
    for part in parts:
        metric_sums.add("loss", part.sum())
        metric_sums.count("tokens", len(part))
        one_by_one += float(part.sum())
    assert metric_sums.read() == {"loss": one_by_one, "tokens": 1020.0, "none": 0.0}


def test_a_number_that_is_not_finite_stays_so() -> None:
    metric_sums = MetricSums(["loss"])
    for value in (1.0, float("inf"), float("-inf")):
        metric_sums.add("loss", torch.tensor(value))
    assert metric_sums.read()["loss"] != metric_sums.read()["loss"]


def test_laps_add_up_and_name_what_was_asked_for() -> None:
    step_timer = StepTimer(torch.device("cpu"))
    for lap in ("forward", "backward", "forward", "probe"):
        step_timer.end(lap)
    found = step_timer.seconds()
    assert set(found) == {"forward", "backward", "optimizer", "probe"}
    assert found["optimizer"] == 0.0 and min(found.values()) >= 0.0
