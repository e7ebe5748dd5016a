"""Gated delta nets on a GPU: flash-linear-attention's kernels compared with plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sightline.families import gated_delta_net
from sightline.families.gated_delta_net import apply_delta_rule, build_recurrence_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def draw(tokens: int, heads: int, width: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    q, k, v = (torch.randn(tokens, heads, width, **options).bfloat16() for _ in range(3))
    decay = -torch.rand(tokens, heads, **options)
    beta = torch.rand(tokens, heads, **options).bfloat16()
    return [x.requires_grad_() for x in (q, k, v, decay, beta)]


@pytest.mark.parametrize("lengths", [[700], [5, 64, 1, 300], [128, 129, 127]])
def test_packed_sequences_match_plain_torch(lengths: list[int]) -> None:
    pytest.importorskip("fla.ops", reason="without flash-linear-attention on this GPU")
    inputs = draw(sum(lengths), heads=4, width=64)
    ends = np.repeat(np.cumsum(lengths), lengths)
    plan = build_recurrence_plan(ends, 4, torch.device("cuda"))
    device = torch.device("cuda", torch.cuda.current_device())
    if gated_delta_net._find_kernel(64, 64, device, torch.bfloat16) is None:
        pytest.skip("flash-linear-attention does not compute this on this GPU")
    assert plan.bounds is not None
    flat = apply_delta_rule(*inputs, plan)
    gradients = torch.autograd.grad(flat.float().square().sum(), inputs)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    plain = apply_delta_rule(*wide, plan)  # the kernels take no float32
    wanted = torch.autograd.grad(plain.square().sum(), wide)
    for actual, expected in zip((flat, *gradients), (plain, *wanted), strict=True):
        difference = float((actual.float() - expected).detach().norm() / expected.detach().norm())
        print(f"{difference:.2g}", end=" ")
        assert difference < 2e-2
