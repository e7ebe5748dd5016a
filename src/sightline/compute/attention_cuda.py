"""Attention on a GPU: torch's own kernels for rows of any lengths, and for trees.

Rows and images go through `varlen_attn`, which reads no padding, or, where their shapes come back,
through cuDNN (`attention_cudnn`). A tree goes through flex attention, with a block mask made from
`subtree_end` by arithmetic on blocks: no mask of all pairs is ever made.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from sightline.compute import attention_cudnn
from sightline.compute.attention_shapes import (
    Attended,
    Bounds,
    Keys,
    Queries,
    TokenKeys,
    TokenQueries,
    Values,
)
from sightline.families.device_copy import copy_to_device
from sightline.families.gated_delta_net import take_trial_gradients

BLOCK = 128
TREE_BUCKET = 1024
"""Trees are padded to a multiple, so that few shapes of masks are seen."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels for rows support."""


def is_supported(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF_DTYPES


def attend_varlen(
    q: TokenQueries,
    k: TokenKeys,
    v: TokenKeys,
    scaling: float,
    ends: Bounds,
    longest: int,
    causal: bool,
    key_ends: Bounds | None = None,
    key_longest: int = 0,
) -> TokenQueries:
    """Attention in each of the sequences side by side that end at `ends`, without padding.

    Where `key_ends` are given, a sequence has more keys than queries: the queries are its last.
    """
    attend, options = _varlen()
    if q.shape[1] != k.shape[1] and not options and torch.is_grad_enabled():
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    window = (-1, 0) if causal else (-1, -1)
    if key_ends is None:
        key_ends, key_longest = ends, longest
    out: Tensor = attend(
        q, k, v, ends, key_ends, longest, key_longest, scale=scaling, window_size=window, **options
    )
    return out


def _attend_sequences(
    q: Queries,
    k: Keys,
    v: Values,
    scaling: float,
    ends: Bounds,
    longest: int,
    causal: bool,
    attend_cudnn: Callable[..., Tensor] | None,
) -> Attended:
    """Attention in each of the sequences of one row, by `attend_cudnn` where there is one and cuDNN
    can be used."""
    width = v.shape[-1]
    # Not x[0], whose backward pass would fill and copy.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, pad_values(v, k)))
    heads = (q.shape[1], k.shape[1])
    # Not `if attend_cudnn`: the truth of a method breaks the graph of the compiler.
    if attend_cudnn is not None and is_cudnn_usable(heads, q.shape[-1], causal, q.device, q.dtype):
        out = attend_cudnn(q, k, v, scaling)
    else:
        out = attend_varlen(q, k, v, scaling, ends, longest, causal)
    return out[..., :width].transpose(0, 1).unsqueeze(0)


@torch.compiler.assume_constant_result
def is_cudnn_usable(
    heads: tuple[int, int], width: int, causal: bool, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether cuDNN supports such heads (of queries and keys), with the same outputs and
    gradients as the kernels for rows of any lengths."""
    return _try_cudnn(heads, width, causal, device, dtype)


@functools.cache
def _try_cudnn(
    heads: tuple[int, int], width: int, causal: bool, device: torch.device, dtype: torch.dtype
) -> bool:
    length, scaling = 256, width**-0.5
    ends = torch.arange(0, 2 * length + 1, length, dtype=torch.int32, device=device)
    with take_trial_gradients():
        # No random numbers: those of the run are to stay as they are.
        shapes = [(2 * length, num, width) for num in (heads[0], heads[1], heads[1])]
        angles = (torch.arange(math.prod(shape), device=device).view(shape) for shape in shapes)
        q, k, v = inputs = [x.sin().to(dtype).requires_grad_() for x in angles]
        try:
            results = [
                (out, *torch.autograd.grad(out.float().square().sum(), inputs))
                for out in (
                    attention_cudnn.attend_equal_rows(q, k, v, scaling, 2, causal),
                    attend_varlen(q, k, v, scaling, ends, length, causal),
                )
            ]
        except (RuntimeError, ValueError, TypeError):
            return False
        return all(
            x.shape == y.shape and bool((x - y).float().norm() <= 2e-2 * y.float().norm())
            for x, y in zip(*results, strict=True)
        )


def pad_values(v: Tensor, k: Tensor) -> Tensor:
    """Values as wide as keys: fused kernels take no narrower ones, and what torch does instead is
    several times slower."""
    missing = k.shape[-1] - v.shape[-1]
    return F.pad(v, (0, missing)) if missing > 0 else v


def _varlen() -> tuple[Callable[..., Any], dict[str, Any]]:
    """torch's function, and the option by which torch 2.12 and later take heads that share keys and
    values. Where it is not known, the kernel still takes them; for gradients they are repeated."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if _has_gqa_option() else {}


@torch.compiler.assume_constant_result
def _has_gqa_option() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


class ImagePattern:
    """Images side by side, each seeing all of itself. Whether they are of one size, and it came
    back, is decided outside of what is compiled."""

    def __init__(self, is_even: bool) -> None:
        self._is_even = is_even

    def attend(
        self, q: Queries, k: Keys, v: Values, scaling: float, ends: Bounds, longest: int
    ) -> Attended:
        even = None
        if self._is_even:
            rows = ends.shape[0] - 1
            even = functools.partial(attention_cudnn.attend_equal_rows, rows=rows, causal=False)
        return _attend_sequences(q, k, v, scaling, ends, longest, False, even)


def get_image_pattern(tokens: int, ends: Bounds, longest: int) -> ImagePattern:
    return _cached_image_pattern(attention_cudnn.decide_images(ends, longest, tokens))


_cached_image_pattern = functools.cache(ImagePattern)


class VarlenPattern:
    """Sequences side by side in one row, each causal in itself and blind to the others."""

    state = None

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        ends = np.cumsum([0, *lengths])
        self.subtree_end = np.repeat(ends[1:], lengths)
        self._ends = copy_to_device(ends.astype(np.int32), device)
        self._longest = max(lengths)
        self._padded = attention_cudnn.build_padded_rows(lengths, device)

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        padded = None if self._padded is None else self._padded.attend
        return _attend_sequences(q, k, v, scaling, self._ends, self._longest, True, padded)


class FlexTreePattern:
    """Nodes each once: q sees k when k <= q < subtree_end[k]."""

    state = None

    def __init__(self, subtree_end: np.ndarray, device: torch.device) -> None:
        self.subtree_end = subtree_end
        padded = pad_subtree_ends(subtree_end)
        self._end = copy_to_device(padded.astype(np.int32), device)
        self._mask = _block_mask(padded, self._end, device)

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        # Of shapes, not of a number that is kept: for a compiler those are one graph.
        width, missing = v.shape[-1], self._end.shape[0] - q.shape[2]
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, pad_values(v, k)))
        gqa = q.shape[1] != k.shape[1]
        out = _flex()(q, k, v, block_mask=self._mask, scale=scaling, enable_gqa=gqa)
        result: Tensor = out[:, :, : out.shape[2] - missing, :width]
        return result


def pad_subtree_ends(subtree_end: Int[np.ndarray, " tokens"]) -> Int[np.ndarray, " padded"]:
    """With tokens behind the last that are a tree of their own, up to the next bucket."""
    total = -(-len(subtree_end) // TREE_BUCKET) * TREE_BUCKET
    return np.concatenate([subtree_end, np.full(total - len(subtree_end), total)])


def find_visible_blocks(
    padded: Int[np.ndarray, " tokens"],
) -> tuple[Bool[np.ndarray, "blocks blocks"], Bool[np.ndarray, "blocks blocks"]]:
    """Which blocks of keys (the last axis) a block of queries sees some of, and all of."""
    by_block = padded.reshape(-1, BLOCK)
    first = np.arange(len(by_block)) * BLOCK
    before = first[None, :] < first[:, None]
    same = first[None, :] == first[:, None]
    # Every key of an earlier block comes before every query: only the ends decide.
    some = before & (by_block.max(axis=1)[None, :] > first[:, None])
    full = before & (by_block.min(axis=1)[None, :] >= first[:, None] + BLOCK)
    return (some & ~full) | same, full


def _block_mask(padded: np.ndarray, end: Tensor, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def sees(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end[k])

    partial, full = (_list_blocks(blocks, device) for blocks in find_visible_blocks(padded))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees)


def _list_blocks(
    blocks: Bool[np.ndarray, "blocks blocks"], device: torch.device
) -> tuple[Int[Tensor, "1 1 blocks"], Int[Tensor, "1 1 blocks blocks"]]:
    """For each block of queries how many blocks, and which, these first."""
    counts = blocks.sum(axis=1).astype(np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return copy_to_device(counts, device)[None, None], copy_to_device(order, device)[None, None]


def _flex() -> Any:
    """Inside of what is compiled already, as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@functools.cache
def _compiled_flex() -> Any:
    """One graph for the first shape, and one for all others: as many as there are buckets would
    pass the compiler's limit, after which it does not compile."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
