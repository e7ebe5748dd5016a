"""Random weights of large checkpoints."""

from __future__ import annotations

import torch
from torch import nn

from sightline.families.tiny_checkpoint import DRAWN_AT_ONCE, draw_weights


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4096, DRAWN_AT_ONCE // 4096 + 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)
        self.other = nn.Embedding(30, 40)


def test_tensors_are_drawn_by_name_and_seed_and_in_parts_where_they_are_large() -> None:
    with torch.device("meta"):
        model = Layers()
    drawn = draw_weights(model, seed=1, std=0.02)
    assert {name: (x.shape, x.dtype) for name, x in drawn.items()} == {
        name: (x.shape, x.dtype) for name, x in model.named_parameters()
    }
    wide = drawn["wide.weight"].view(-1)
    for part in (wide[:DRAWN_AT_ONCE], wide[DRAWN_AT_ONCE:], drawn["other.weight"]):
        assert abs(float(part.float().mean())) < 0.02 / len(part.view(-1)) ** 0.5 * 5
        assert abs(float(part.float().std()) / 0.02 - 1) < 0.1
    rest = wide[DRAWN_AT_ONCE:]
    assert not torch.equal(rest, wide[: len(rest)])
    assert torch.equal(drawn["norm.weight"], torch.ones(8))
    assert not drawn["norm.bias"].any() and not drawn["wide.bias"].any()
    again, other = draw_weights(model, seed=1, std=0.02), draw_weights(model, seed=2, std=0.02)
    assert torch.equal(again["wide.weight"], drawn["wide.weight"])
    assert not torch.equal(other["other.weight"], drawn["other.weight"])
