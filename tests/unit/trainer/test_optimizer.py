from __future__ import annotations

from pathlib import Path

import making
import pytest

from sightline.compute.model import load_model
from sightline.trainer.optimizer import build_optimizer, lr_scale, set_learning_rate


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)],
)
def test_the_learning_rate_rises_then_falls_to_its_end(
    schedule: str, middle: float, last: float
) -> None:
    config = making.trainer_config(warmup_steps=4, lr_schedule=schedule, final_lr_fraction=0.1)
    rates = [lr_scale(config, step, 24) for step in range(1, 25)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[13] == pytest.approx(middle)
    assert rates[23] == pytest.approx(last)


def test_vision_tower_can_have_its_own_learning_rate(tiny_model: Path) -> None:
    forward = load_model(str(tiny_model), making.family(tiny_model), "cpu", "float32")
    config = making.trainer_config(lr=1e-3, vision_lr=1e-4)
    optimizer = build_optimizer(forward, config)
    set_learning_rate(optimizer, 0.5)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    vision = {id(p) for _, p in forward.vision_parameters()}
    assert len(rates) == sum(1 for _ in forward.model.parameters())
    assert {rates[id(p)] for p in forward.model.parameters() if id(p) in vision} == {0.5e-4}
    assert {rates[id(p)] for p in forward.model.parameters() if id(p) not in vision} == {0.5e-3}
