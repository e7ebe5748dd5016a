"""The attention functions for GPUs give the same results as the plain ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sightline.compute import attention_cuda, attention_cudnn  # noqa: E402
from sightline.compute.attention import PackedPattern, TreePattern, build_attention_pattern  # noqa: E402
from sightline.compute.attention_cuda import (  # noqa: E402
    FlexTreePattern,
    ImagePattern,
    VarlenPattern,
    is_cudnn_usable,
)

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


def test_varlen_attention_matches_plain_attention() -> None:
    device, lengths = torch.device("cuda"), [5, 300, 1, 77, 128]
    ends = np.repeat(np.cumsum(lengths), lengths)
    pattern = build_attention_pattern(ends, device, torch.bfloat16)
    assert isinstance(pattern, VarlenPattern)
    inputs = draw(sum(lengths), torch.bfloat16)
    plain = PackedPattern(lengths, device)
    compare(
        lambda q, k, v: pattern.attend(0, q, k, v, 0.125),
        lambda q, k, v: plain.attend(0, q, k, v, 0.125),
        inputs,
        torch.bfloat16,
    )


def test_image_tokens_attend_to_their_whole_image() -> None:
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
        lambda q, k, v: ImagePattern(False).attend(q, k, v, 0.125, bounds, 256),
        plain, inputs, torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [700, 1500])
def test_tree_attention_matches_plain_attention(size: int, dtype: torch.dtype) -> None:
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
    pattern = build_attention_pattern(ends, device, dtype)
    assert isinstance(pattern, FlexTreePattern)
    plain = TreePattern(ends, device)
    compare(
        lambda q, k, v: pattern.attend(0, q, k, v, 0.125),
        lambda q, k, v: plain.attend(0, q, k, v, 0.125),
        draw(size, dtype),
        dtype,
    )


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cudnn, "SHAPES", attention_cudnn.ShapeCounter())


@pytest.mark.parametrize("lengths", [[2043, 2040, 1900], [2048, 2048], [1500, 700, 680]], ids=str)
def test_rows_with_repeated_shapes_are_padded(lengths: list[int]) -> None:
    device = torch.device("cuda")
    ends = np.repeat(np.cumsum(lengths), lengths)
    for _ in range(attention_cudnn.MIN_SHAPE_REPEATS):
        pattern = build_attention_pattern(ends, device, torch.bfloat16)
    assert isinstance(pattern, VarlenPattern) and pattern._padded is not None
    inputs = draw(sum(lengths), torch.bfloat16)
    plain = PackedPattern(lengths, device)
    compare(
        lambda q, k, v: pattern.attend(0, q, k, v, 0.125),
        lambda q, k, v: plain.attend(0, q, k, v, 0.125),
        inputs,
        torch.bfloat16,
    )
    assert is_cudnn_usable((8, 2), 64, True, inputs[0].device, torch.bfloat16)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("width", [64, 72, 80])
def test_repeated_equal_sized_images_match_plain_attention(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head sizes of the towers of Qwen3-VL, Kimi K2.5 and Qwen2.5-VL."""
    torch.manual_seed(width)
    inputs = [
        torch.randn(1, 4, 3072, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    scaling = width**-0.5
    went = []
    even = attention_cudnn.attend_equal_rows
    monkeypatch.setattr(
        attention_cudnn,
        "attend_equal_rows",
        lambda *args, **more: went.append(args) or even(*args, **more),
    )

    def plain(q, k, v):  # type: ignore[no-untyped-def]
        q, k, v = (x.unflatten(2, (3, 1024)).transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling)
        return out.transpose(1, 2).flatten(2, 3)

    for micro_batch in range(1, attention_cudnn.MIN_SHAPE_REPEATS + 1):
        bounds = torch.arange(0, 3073, 1024, dtype=torch.int32, device="cuda")
        for x in inputs:
            x.grad = None
        images = attention_cuda.get_image_pattern(3072, bounds, 1024)
        compare(
            lambda q, k, v, images=images, bounds=bounds: images.attend(
                q, k, v, scaling, bounds, 1024
            ),
            plain, inputs, torch.bfloat16,
        )  # fmt: skip
        assert bool(went) == (micro_batch == attention_cudnn.MIN_SHAPE_REPEATS)
