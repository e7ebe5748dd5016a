"""Padding of rows of similar length. The layout is arithmetic and runs on any machine."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sightline.compute import attention_cudnn
from sightline.compute.attention import PackedPattern
from sightline.compute.attention_cudnn import (
    MAX_GROUPS,
    MIN_LENGTH_RATIO,
    MIN_SHAPE_REPEATS,
    ShapeCounter,
    build_padded_rows,
    decide_images,
    group_by_length,
    padded_length,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(q: Any, k: Any, v: Any, scaling: float, causal: bool) -> torch.Tensor:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scaling, enable_gqa=gqa
        )

    monkeypatch.setattr(attention_cudnn, "_cudnn", plain)


def seen_often(lengths: list[int]) -> ShapeCounter:
    plans = ShapeCounter()
    for _ in range(MIN_SHAPE_REPEATS):
        for rows in group_by_length(lengths):
            plans.count_shape(len(rows), padded_length(rows, lengths))
    return plans


@pytest.mark.parametrize(
    "lengths", [[2048], [1020, 1024, 900], [700, 2000, 690, 2048, 300, 310, 320]], ids=str
)
def test_padded_rows_match_plain_ones(lengths: list[int]) -> None:
    torch.manual_seed(0)
    padded = build_padded_rows(lengths, CPU, seen_often(lengths))
    assert padded is not None
    plain = PackedPattern(lengths, CPU)
    first = [torch.randn(1, n, sum(lengths), 16, requires_grad=True) for n in (4, 2, 2)]
    second = [x.detach().clone().requires_grad_() for x in first]
    ours = padded.attend(*(x.squeeze(0).transpose(0, 1) for x in first), 0.3)
    wanted = plain.attend(0, *second, 0.3)[0].transpose(0, 1)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    pull = torch.randn_like(wanted)
    ours.backward(pull)
    wanted.backward(pull)
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_one_length_group(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 5000) for _ in range(rng.randint(1, 30))]
    groups = group_by_length(lengths)
    assert sorted(row for rows in groups for row in rows) == list(range(len(lengths)))
    for rows in groups:
        group_lengths = [lengths[row] for row in rows]
        assert min(group_lengths) >= MIN_LENGTH_RATIO * max(group_lengths)
        assert max(group_lengths) <= padded_length(rows, lengths)


def test_repeated_shape_gets_a_plan() -> None:
    plans = ShapeCounter()
    lengths = [2000, 1990]
    has_plan = [
        build_padded_rows(lengths, CPU, plans) is not None for _ in range(MIN_SHAPE_REPEATS + 1)
    ]
    assert has_plan == [False] * (MIN_SHAPE_REPEATS - 1) + [True, True]
    # Other lengths with the same padded shape.
    assert build_padded_rows([1900, 2040], CPU, plans) is not None
    assert build_padded_rows([1900, 2049], CPU, plans) is None


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([100 * 2**n for n in range(MAX_GROUPS + 1)], "too many groups"),
        ([1000, 900], "too few tokens"),
        ([260] * 20, "almost half is padding"),
    ],
)
def test_rows_with_costly_padding_are_not_padded(lengths: list[int], why: str) -> None:
    assert build_padded_rows(lengths, CPU, seen_often(lengths)) is None, why


def test_image_attention_is_chosen_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cudnn, "SHAPES", ShapeCounter())

    def layers(ends: list[int], longest: int) -> list[bool]:
        bounds = torch.tensor(ends, dtype=torch.int32)
        # The last one is recomputed in the backward pass.
        return [decide_images(bounds, longest, ends[-1]) for _ in range(5)]

    even = [0, 1024, 2048, 3072]
    outputs = [layers(even, 1024) for _ in range(MIN_SHAPE_REPEATS)]
    assert outputs == [[False] * 5] * (MIN_SHAPE_REPEATS - 1) + [[True] * 5]
    for _ in range(MIN_SHAPE_REPEATS):
        assert layers([0, 1024, 3072], 2048) == [False] * 5, "of two sizes"
        assert layers([0, 16, 32], 16) == [False] * 5, "too small"
    with torch.no_grad():
        assert layers(even, 1024) == [False] * 5
    gc.collect()
    assert len(attention_cudnn._decision_by_bounds) == 0, (
        "what is decided goes with the micro-batch"
    )
