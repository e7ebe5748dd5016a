"""Whether an attention function takes heads that share keys and values is found by trying it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sightline.compute.attention_cuda import supports_gqa

CPU = torch.device("cpu")


def rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any, **options: Any) -> Any:
    parts = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        part = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*part, is_causal=True, **options)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def knows(q, k, v, ends, _, longest, __, scale, window_size):  # type: ignore[no-untyped-def]
    return rows(q, k, v, ends, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def refuses(q, k, v, ends, _, longest, __, scale, window_size):  # type: ignore[no-untyped-def]
    if q.shape[1] != k.shape[1]:
        raise RuntimeError("as many heads of keys as of queries")
    return rows(q, k, v, ends, scale=scale)


def mixes_up(q, k, v, ends, _, longest, __, scale, window_size):  # type: ignore[no-untyped-def]
    times = q.shape[1] // k.shape[1]
    return rows(q, k.repeat(1, times, 1), v.repeat(1, times, 1), ends, scale=scale)


def forgets_gradients(q, k, v, ends, _, longest, __, scale, window_size):  # type: ignore[no-untyped-def]
    k = k if q.shape[1] == k.shape[1] else k.detach()
    return knows(q, k, v, ends, ends, longest, longest, scale, window_size)


def test_a_function_that_knows_is_given_few_heads() -> None:
    assert supports_gqa(knows, CPU, torch.float32)


def test_one_that_refuses_or_is_wrong_is_given_repeated_heads() -> None:
    for attend in (refuses, mixes_up, forgets_gradients):
        assert not supports_gqa(attend, CPU, torch.float32), attend.__name__
