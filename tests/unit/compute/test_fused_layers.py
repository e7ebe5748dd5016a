"""Which modules are replaced. Tests on a GPU check the replacements' results."""

from __future__ import annotations

import pytest
from torch import nn

from sightline.compute.fused_layers import _build_attention, _find_replacement


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width * heads, width * heads) for _ in range(4)
        )
        self.head_dim = width


@pytest.mark.parametrize(("width", "is_replaced"), [(64, True), (80, False), (96, False)])
def test_unsupported_head_width_is_not_fused(width: int, is_replaced: bool) -> None:
    assert (_find_replacement(Attention(width), False) is _build_attention) == is_replaced


def test_attention_without_a_known_width_is_not_fused() -> None:
    module = Attention(64)
    del module.head_dim
    assert _find_replacement(module, False) is None
