from __future__ import annotations

import making
import pytest

from sightline.trainer.optimizer import learning_rate


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)],
)
def test_the_learning_rate_rises_then_falls_to_its_end(
    schedule: str, middle: float, last: float
) -> None:
    config = making.trainer_config(lr=2.0, warmup_steps=4, schedule=schedule, lr_end=0.1)
    rates = [learning_rate(config, step, 24) / 2.0 for step in range(1, 25)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[13] == pytest.approx(middle)
    assert rates[23] == pytest.approx(last)
