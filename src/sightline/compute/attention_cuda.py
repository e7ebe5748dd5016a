"""Attention on a GPU: torch's own kernels for rows of any length, and for trees.

Rows and images use `varlen_attn`, which needs no padding. If their shapes repeat, they use cuDNN
(`attention_cudnn`). Trees use flex attention with a block mask that is computed from `subtree_end`
block by block, so that a full mask never exists.
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
"""Trees are padded to a multiple of this, so that masks have few shapes."""
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
    """Return the attention output of packed sequences that end at `ends`, without padding.

    With `key_ends`, a sequence may have more keys than queries, which are its last tokens.
    """
    attend, options = _varlen()
    if q.shape[1] != k.shape[1] and not options and torch.is_grad_enabled():
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    window = (-1, 0) if causal else (-1, -1)
    if key_ends is None:
        key_ends, key_longest = ends, longest
    return attend(
        q, k, v, ends, key_ends, longest, key_longest, scale=scaling, window_size=window, **options
    )


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
    """Return the attention output of packed sequences, with `attend_cudnn` if it is given and cuDNN
    is usable."""
    width = v.shape[-1]
    # Not x[0], whose backward pass would allocate and copy.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, pad_values(v, k)))
    heads = (q.shape[1], k.shape[1])
    # Not `if attend_cudnn`: the truth value of a method breaks the compiler's graph.
    if attend_cudnn is not None and is_cudnn_usable(heads, q.shape[-1], causal, q.device, q.dtype):
        out = attend_cudnn(q, k, v, scaling)
    else:
        out = attend_varlen(q, k, v, scaling, ends, longest, causal)
    return out[..., :width].transpose(0, 1).unsqueeze(0)


@torch.compiler.assume_constant_result
def is_cudnn_usable(
    heads: tuple[int, int], width: int, causal: bool, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether cuDNN supports these numbers of query and key heads, and gives the same
    outputs and gradients as the kernels for rows of any length."""
    return _try_cudnn(heads, width, causal, device, dtype)


@functools.cache
def _try_cudnn(
    heads: tuple[int, int], width: int, causal: bool, device: torch.device, dtype: torch.dtype
) -> bool:
    length, scaling = 256, width**-0.5
    ends = torch.arange(0, 2 * length + 1, length, dtype=torch.int32, device=device)
    with take_trial_gradients():
        # Deterministic inputs, to keep the run's random state.
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
    """Pad values to the width of keys. Fused kernels do not support narrower ones, and torch's
    fallback is several times slower."""
    missing = k.shape[-1] - v.shape[-1]
    return F.pad(v, (0, missing)) if missing > 0 else v


def _varlen() -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return torch's function, and its option for heads that share keys and values (torch 2.12 and
    later). Without the option the kernel still supports them, but gradients need repeated heads."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if _has_gqa_option() else {}


@torch.compiler.assume_constant_result
def _has_gqa_option() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


class ImagePattern:
    """Packed images, with full attention within each. `is_even` means that all have one size, which
    has repeated. It is decided outside of the compiled code."""

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
    """Packed sequences in one row, with causal attention within each sequence."""

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
    """Tree attention with a block mask: q sees k if k <= q < subtree_end[k]."""

    state = None

    def __init__(self, subtree_end: np.ndarray, device: torch.device) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        self.subtree_end = subtree_end
        padded = pad_subtree_ends(subtree_end)
        self._end = end = copy_to_device(padded.astype(np.int32), device)

        def sees(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < end[k])

        partial, full = (_list_blocks(blocks, device) for blocks in find_visible_blocks(padded))
        self._mask = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees)

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        # Computed from shapes, not from a stored number, so that the compiler needs one graph.
        width, missing = v.shape[-1], self._end.shape[0] - q.shape[2]
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, pad_values(v, k)))
        gqa = q.shape[1] != k.shape[1]
        out = _flex()(q, k, v, block_mask=self._mask, scale=scaling, enable_gqa=gqa)
        return out[:, :, : out.shape[2] - missing, :width]


def pad_subtree_ends(subtree_end: Int[np.ndarray, " tokens"]) -> Int[np.ndarray, " padded"]:
    """Pad to the next bucket. The padding tokens form a separate tree."""
    total = -(-len(subtree_end) // TREE_BUCKET) * TREE_BUCKET
    return np.concatenate([subtree_end, np.full(total - len(subtree_end), total)])


def find_visible_blocks(
    padded: Int[np.ndarray, " tokens"],
) -> tuple[Bool[np.ndarray, "blocks blocks"], Bool[np.ndarray, "blocks blocks"]]:
    """Return which key blocks (last axis) each query block sees in part, and which in full."""
    by_block = padded.reshape(-1, BLOCK)
    first = np.arange(len(by_block)) * BLOCK
    before = first[None, :] < first[:, None]
    same = first[None, :] == first[:, None]
    # All keys of an earlier block precede all queries, so only the subtree ends matter.
    some = before & (by_block.max(axis=1)[None, :] > first[:, None])
    full = before & (by_block.min(axis=1)[None, :] >= first[:, None] + BLOCK)
    return (some & ~full) | same, full


def _list_blocks(
    blocks: Bool[np.ndarray, "blocks blocks"], device: torch.device
) -> tuple[Int[Tensor, "1 1 blocks"], Int[Tensor, "1 1 blocks blocks"]]:
    """Return each query block's number of key blocks, and all block indices with those first."""
    counts = blocks.sum(axis=1).astype(np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return copy_to_device(counts, device)[None, None], copy_to_device(order, device)[None, None]


def _flex() -> Any:
    """Return flex attention, compiled unless a compiler is already tracing."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@functools.cache
def _compiled_flex() -> Any:
    """Return compiled flex attention. It has one graph for the first shape and one for all others,
    because one graph per bucket would exceed the compiler's limit."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
