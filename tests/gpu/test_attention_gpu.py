"""The attention functions of a GPU give what the plain ones give."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sightline.compute import attention_cuda  # noqa: E402
from sightline.compute.attention import Flat, Tree, pattern_of  # noqa: E402
from sightline.compute.attention_cuda import FlexTree, Rows, rows_of_lengths  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
BOUND = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


def draw(length: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [
        torch.randn(1, heads, length, 64, device="cuda", dtype=dtype, requires_grad=True)
        for heads in (8, 2, 2)
    ]


def compare(ours, plain, inputs, dtype) -> None:  # type: ignore[no-untyped-def]
    """Outputs and gradients, against the plain function in float32."""
    exact = [x.detach().float().requires_grad_() for x in inputs]
    out, wanted = ours(*inputs), plain(*exact)
    pull = torch.randn_like(wanted)
    out.backward(pull.to(out.dtype))
    wanted.backward(pull)
    bound = BOUND[dtype]
    torch.testing.assert_close(out.float(), wanted, rtol=bound, atol=bound)
    for x, y in zip(inputs, exact, strict=True):
        size = float(y.grad.norm())
        assert float((x.grad.float() - y.grad).norm()) / size < bound


def test_rows_of_any_lengths() -> None:
    device, lengths = torch.device("cuda"), [5, 300, 1, 77, 128]
    ends = np.repeat(np.cumsum(lengths), lengths)
    pattern = pattern_of(ends, device, torch.bfloat16)
    assert isinstance(pattern, Rows)
    inputs = draw(sum(lengths), torch.bfloat16)
    plain = Flat(lengths, device)
    compare(
        lambda q, k, v: pattern.attend(0, q, k, v, 0.125),
        lambda q, k, v: plain.attend(0, q, k, v, 0.125),
        inputs,
        torch.bfloat16,
    )


def test_images_see_all_of_themselves() -> None:
    bounds = torch.tensor([0, 64, 320, 330], dtype=torch.int32, device="cuda")
    inputs = draw(330, torch.bfloat16)

    def plain(q, k, v):  # type: ignore[no-untyped-def]
        k, v = (x.repeat_interleave(4, dim=1) for x in (k, v))
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], scale=0.125
            )
            for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        return torch.cat(parts, dim=2)

    compare(
        lambda q, k, v: rows_of_lengths(q, k, v, 0.125, bounds, 256, causal=False),
        plain, inputs, torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [700, 1500])
def test_trees(size: int, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rng, ends = random.Random(size), np.zeros(size, dtype=np.int64)

    def grow(start: int, stop: int) -> None:
        while start < stop:
            trunk = min(stop, start + rng.randint(1, 200))
            end = rng.randint(trunk, stop)
            ends[start:trunk] = end
            grow(trunk, end)
            start = end

    grow(0, size)
    device = torch.device("cuda")
    pattern = pattern_of(ends, device, dtype)
    assert isinstance(pattern, FlexTree)
    plain = Tree(ends, device)
    compare(
        lambda q, k, v: pattern.attend(0, q, k, v, 0.125),
        lambda q, k, v: plain.attend(0, q, k, v, 0.125),
        draw(size, dtype),
        dtype,
    )


def test_heads_that_share_keys_are_not_repeated_where_torch_knows_them() -> None:
    attend, options = attention_cuda._varlen()
    device = torch.device("cuda", torch.cuda.current_device())
    found = attention_cuda.shares_heads(attend, device, torch.bfloat16, **options)
    assert found or not options, "a function with enable_gqa takes few heads"
