"""Attention on a GPU: torch's own kernels for rows of any lengths, and for trees.

Rows and images go through `varlen_attn`, which reads no padding, or, where their shapes come back,
through cuDNN (`attention_cudnn`). A tree goes through flex attention, with a block mask made from
`subtree_end` by arithmetic on blocks: no mask of all pairs is ever made.

Letters: B rows, T tokens, N heads, D head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sightline.compute import attention_cudnn
from sightline.compute.attention_check import is_equivalent
from sightline.families.device_copy import copy_to_device

BLOCK = 128
TREE_BUCKET = 1024
"""Trees are padded to a multiple, so that few shapes of masks are seen."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
"""What the kernels for rows take."""


def is_supported(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF_DTYPES


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    ends: torch.Tensor,
    longest: int,
    causal: bool,
) -> torch.Tensor:
    """(T, N, D) of q (T, N, D) and k, v (T, N or fewer, D): sequences side by side that end, from 0
    on, at `ends` (int32); without padding."""
    attend, options = _varlen()
    if q.shape[1] != k.shape[1] and not options:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    window = (-1, 0) if causal else (-1, -1)
    return attend(
        q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window, **options
    )


def _to_token_major(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(T, N, D) of (1, N, T, D), values as wide as keys."""
    # Not x[0], whose backward pass would fill and copy.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, _pad_values(v, k)))
    return q, k, v


@torch.compiler.assume_constant_result
def is_cudnn_usable(
    heads: tuple[int, int], width: int, causal: bool, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether cuDNN takes such heads, and gives what the kernels for rows of any lengths give."""
    return _try_cudnn(heads, width, causal, device, dtype)


@functools.cache
def _try_cudnn(
    heads: tuple[int, int], width: int, causal: bool, device: torch.device, dtype: torch.dtype
) -> bool:
    length, scaling = 256, width**-0.5
    ends = torch.arange(0, 2 * length + 1, length, dtype=torch.int32, device=device)
    return is_equivalent(
        lambda q, k, v: attention_cudnn.attend_equal_rows(q, k, v, scaling, 2, causal),
        lambda q, k, v: attend_varlen(q, k, v, scaling, ends, length, causal),
        2 * length, heads, width, device, dtype,
    )  # fmt: skip


def _pad_values(v: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    missing = k.shape[-1] - v.shape[-1]
    return F.pad(v, (0, missing)) if missing > 0 else v


def _varlen() -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
    """torch's function, and the option by which torch 2.12 and later take heads that share keys and
    values; where it is not known, they are repeated."""
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
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        ends: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """(1, N, T, D) of images that end, from 0 on, at `ends` (int32)."""
        width = v.shape[-1]
        q, k, v = _to_token_major(q, k, v)
        heads = (q.shape[1], k.shape[1])
        if self._is_even and is_cudnn_usable(heads, q.shape[-1], False, q.device, q.dtype):
            out = attention_cudnn.attend_equal_rows(
                q, k, v, scaling, ends.shape[0] - 1, causal=False
            )
        else:
            out = attend_varlen(q, k, v, scaling, ends, longest, causal=False)
        return out[..., :width].transpose(0, 1).unsqueeze(0)


def get_image_pattern(tokens: int, ends: torch.Tensor, longest: int) -> ImagePattern:
    return _cached_image_pattern(attention_cudnn.decide_images(ends, longest, tokens))


_cached_image_pattern = functools.cache(ImagePattern)


class VarlenPattern:
    """Sequences side by side in one row, each causal in itself and blind to the others."""

    state = None

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        ends = np.cumsum([0, *lengths])
        self._ends = copy_to_device(ends.astype(np.int32), device)
        self._longest = max(lengths)
        self._padded = attention_cudnn.build_padded_rows(lengths, device)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        width = v.shape[-1]
        q, k, v = _to_token_major(q, k, v)
        heads = (q.shape[1], k.shape[1])
        if self._padded is not None and is_cudnn_usable(
            heads, q.shape[-1], True, q.device, q.dtype
        ):
            out = self._padded.attend(q, k, v, scaling)
        else:
            out = attend_varlen(q, k, v, scaling, self._ends, self._longest, causal=True)
        return out[..., :width].transpose(0, 1).unsqueeze(0)


class FlexTreePattern:
    """Nodes each once: q sees k when k <= q < subtree_end[k]."""

    state = None

    def __init__(self, subtree_end: np.ndarray, device: torch.device) -> None:
        padded = pad_subtree_ends(subtree_end)
        self._end = copy_to_device(padded.astype(np.int32), device)
        self._mask = _block_mask(padded, self._end, device)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        # Of shapes, not of a number that is kept: for a compiler those are one graph.
        width, missing = v.shape[-1], self._end.shape[0] - q.shape[2]
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, _pad_values(v, k)))
        gqa = q.shape[1] != k.shape[1]
        out = _flex()(q, k, v, block_mask=self._mask, scale=scaling, enable_gqa=gqa)
        result: torch.Tensor = out[:, :, : out.shape[2] - missing, :width]
        return result


def pad_subtree_ends(subtree_end: np.ndarray) -> np.ndarray:
    """With tokens behind the last that are a tree of their own, up to the next bucket."""
    total = -(-len(subtree_end) // TREE_BUCKET) * TREE_BUCKET
    return np.concatenate([subtree_end, np.full(total - len(subtree_end), total)])


def find_visible_blocks(padded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks of keys a block of queries sees some of, and all of; booleans (Q, K)."""
    by_block = padded.reshape(-1, BLOCK)
    first = np.arange(len(by_block)) * BLOCK
    before = first[None, :] < first[:, None]
    same = first[None, :] == first[:, None]
    # Every key of an earlier block comes before every query: only the ends decide.
    some = before & (by_block.max(axis=1)[None, :] > first[:, None])
    whole = before & (by_block.min(axis=1)[None, :] >= first[:, None] + BLOCK)
    return (some & ~whole) | same, whole


def _block_mask(padded: np.ndarray, end: torch.Tensor, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def sees(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < end[k])

    partial, whole = (_list_blocks(blocks, device) for blocks in find_visible_blocks(padded))
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees)


def _list_blocks(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of queries how many blocks, and which, these first."""
    counts = blocks.sum(axis=1).astype(np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return tuple(copy_to_device(x, device)[None, None] for x in (counts, order))


def _flex() -> Callable[..., Any]:
    """Inside of what is compiled already, as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """One graph for the first shape, and one for all others: as many as there are buckets would
    pass the compiler's limit, after which it does not compile."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled
