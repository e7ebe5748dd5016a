"""What a step measures of itself: sums that are read at once, and seconds by their use."""

from __future__ import annotations

import torch

from sightline.trainer.laps import Laps
from sightline.trainer.tally import Tally


def test_sums_are_those_of_numbers_read_one_by_one() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(n) for n in (3, 1000, 17)]
    tally, one_by_one = Tally(["loss", "tokens", "none"]), 0.0
    for part in parts:
        tally.add("loss", part.sum())
        tally.count("tokens", len(part))
        one_by_one += float(part.sum())
    assert tally.read() == {"loss": one_by_one, "tokens": 1020.0, "none": 0.0}


def test_a_number_that_is_not_finite_stays_so() -> None:
    tally = Tally(["loss"])
    for value in (1.0, float("inf"), float("-inf")):
        tally.add("loss", torch.tensor(value))
    assert tally.read()["loss"] != tally.read()["loss"]


def test_laps_add_up_and_name_what_was_asked_for() -> None:
    laps = Laps(torch.device("cpu"))
    for lap in ("forward", "backward", "forward", "probe"):
        laps.end(lap)
    found = laps.seconds()
    assert set(found) == {"forward", "backward", "optimizer", "probe"}
    assert found["optimizer"] == 0.0 and min(found.values()) >= 0.0
