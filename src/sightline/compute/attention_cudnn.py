"""cuDNN attention for rows of equal length, where it is faster than the kernels for any length.

Rows of similar length are padded to the same length. cuDNN builds a plan for every shape, which
takes longer than it saves in one step, so only repeated shapes use cuDNN. Passes without gradients
never do, so that their bits do not change. With gradients, bits vary between runs in any case.

On an H200, a dense step of a 2.1B model takes 949 ms with this module and 1,017 ms without it
(7.1% more). With recomputed activations it takes 1,165 and 1,241 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cachetools import LRUCache
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sightline.compute.attention_shapes import Bounds, TokenKeys, TokenQueries
from sightline.families.device_copy import copy_to_device

MIN_SHAPE_REPEATS = 3
"""Number of occurrences after which a shape uses cuDNN."""
MIN_TOKENS = 2048
"""Minimum number of tokens in a pack for which a plan is worth its time."""
MIN_LENGTH_RATIO = 0.8
"""Rows shorter than this share of the longest row are not padded to its length."""
MAX_GROUPS = 4
MAX_PADDING_RATIO = 1.3
"""Maximum ratio of attention pairs with padding to pairs without."""
ROW_BUCKET = 256
"""Rows are padded to a multiple of this, so that shapes repeat."""


class ShapeCounter:
    """Counts repeated shapes among the most recent ones."""

    def __init__(self, kept: int = 4096) -> None:
        self._seen: LRUCache[tuple[int, int], int] = LRUCache(kept)

    def count_shape(self, rows: int, length: int) -> bool:
        """Count a shape, and return whether it has occurred often enough."""
        count = self._seen[rows, length] = self._seen.get((rows, length), 0) + 1
        return count >= MIN_SHAPE_REPEATS


SHAPES = ShapeCounter()
_decision_by_bounds: Any = WeakIdKeyDictionary()


def decide_images(ends: Bounds, longest: int, total: int) -> bool:
    """Return whether images that end at `ends` have one length that has repeated.

    This is decided once per micro-batch, because all layers share its tensor of boundaries.
    """
    if not torch.is_grad_enabled():
        return False
    if ends not in _decision_by_bounds:
        rows = len(ends) - 1
        is_even = rows * longest == total >= MIN_TOKENS
        _decision_by_bounds[ends] = is_even and SHAPES.count_shape(rows, longest)
    return bool(_decision_by_bounds[ends])


def attend_equal_rows(
    q: TokenQueries, k: TokenKeys, v: TokenKeys, scaling: float, rows: int, causal: bool
) -> TokenQueries:
    """Return the attention output of `rows` concatenated rows of equal length."""
    q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
    return _cudnn(q, k, v, scaling, causal).transpose(1, 2).flatten(0, 1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )


def pad_rows(
    starts: Int[np.ndarray, " rows"], ends: Int[np.ndarray, " rows"], length: int
) -> tuple[Int[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]]:
    """Return the rows' token indices as a rectangle, and a mask of the real ones. Padding repeats a
    row's first token."""
    tokens = starts[:, None] + np.arange(length)
    is_real = tokens < ends[:, None]
    return np.where(is_real, tokens, starts[:, None]), is_real


class PaddedRows:
    """Causal rows in groups of similar length, padded at the end to one of a few lengths.

    No token attends to later ones, so none attends to the padding.
    """

    def __init__(self, groups: list[list[int]], lengths: Sequence[int], device: torch.device):
        self._num_rows = [len(rows) for rows in groups]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        padded = [pad_rows(starts[g], ends[g], padded_length(g, lengths)) for g in groups]
        self._sizes = [tokens.size for tokens, _ in padded]
        tokens, is_real = (np.concatenate([pair[i].flatten() for pair in padded]) for i in (0, 1))
        places = np.empty(ends[-1], dtype=np.int64)
        places[tokens[is_real]] = np.flatnonzero(is_real)
        self._places, self._tokens, self._unused = (
            copy_to_device(index, device) for index in (places, tokens, np.flatnonzero(~is_real))
        )

    def attend(self, q: TokenQueries, k: TokenKeys, v: TokenKeys, scaling: float) -> TokenQueries:
        index = (self._tokens, self._places, None)
        qs, ks, vs = (_split(_MoveTokens.apply(x, *index), self._sizes) for x in (q, k, v))
        groups = zip(qs, ks, vs, self._num_rows, strict=True)
        parts = [attend_equal_rows(q, k, v, scaling, rows, True) for q, k, v, rows in groups]
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _MoveTokens.apply(padded, self._places, self._tokens, self._unused)


def _split(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return [x] if len(sizes) == 1 else x.split(sizes)


class _MoveTokens(torch.autograd.Function):
    """Compute x[index]. The gradient is gathered with `back`, and is 0 at `unused`. Padding has no
    gradient, because its outputs are not read and no token attends to it. torch's own function
    cannot know that and would add gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "tokens heads width"],
        index: Int[Tensor, " moved"],
        back: Int[Tensor, " tokens"],
        unused: Int[Tensor, " unused"] | None,
    ) -> Float[Tensor, "moved heads width"]:
        ctx.save_for_backward(back, unused)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back, unused = ctx.saved_tensors
        gradient = grads[0].index_select(0, back)
        return gradient if unused is None else gradient.index_fill_(0, unused, 0), None, None, None


def build_padded_rows(
    lengths: Sequence[int], device: torch.device, plans: ShapeCounter = SHAPES
) -> PaddedRows | None:
    """Return padded rows, or None if padding costs too much or the shapes have not repeated."""
    groups = group_by_length(lengths)
    if len(groups) > MAX_GROUPS or sum(lengths) < MIN_TOKENS or not torch.is_grad_enabled():
        return None
    shapes = [(len(rows), padded_length(rows, lengths)) for rows in groups]
    pairs = sum(length * length for length in lengths)
    if sum(rows * length * length for rows, length in shapes) > MAX_PADDING_RATIO * pairs:
        return None
    # Count every shape, even if another one has not repeated.
    count_shape = [plans.count_shape(rows, length) for rows, length in shapes]
    return PaddedRows(groups, lengths, device) if all(count_shape) else None


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of rows that are padded to the same length, the longest rows first."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not groups or lengths[row] < MIN_LENGTH_RATIO * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups


def padded_length(rows: list[int], lengths: Sequence[int]) -> int:
    return -(-max(lengths[row] for row in rows) // ROW_BUCKET) * ROW_BUCKET
