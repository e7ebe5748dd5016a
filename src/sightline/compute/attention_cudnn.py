"""Rows of one length on a GPU: cuDNN's kernels, which are faster there than those for any lengths.

Rows of about one length are padded to it. cuDNN makes a plan for every shape, which takes longer
than it saves in a step: a shape gets one when it comes back. Only where gradients are taken, whose
bits differ from run to run with either kernel; what is only computed forward keeps its bits.

Letters: B rows, L tokens of a row, T tokens, N heads, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from sightline.families.device_copy import copy_to_device

MIN_SHAPE_REPEATS = 3
"""The micro-batch with a shape from which on it has a plan."""
MIN_TOKENS = 2048
"""Fewest tokens of a pack for which a plan is worth its time."""
MIN_LENGTH_RATIO = 0.8
"""Rows shorter than this share of the longest are not padded to it."""
MAX_GROUPS = 4
MAX_PADDING_RATIO = 1.3
"""Pairs of attention with padding over pairs without."""
ROW_BUCKET = 256
"""Padded rows have a multiple of so many tokens, so that shapes come back."""


class ShapeCounter:
    """Which shapes came back, of the last so many."""

    def __init__(self, kept: int = 4096) -> None:
        self._seen: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._kept = kept

    def count_shape(self, rows: int, length: int) -> bool:
        """Whether the shape has been asked for often enough, this time counted."""
        shape = (rows, length)
        self._seen[shape] = self._seen.pop(shape, 0) + 1
        if len(self._seen) > self._kept:
            self._seen.popitem(last=False)
        return self._seen[shape] >= MIN_SHAPE_REPEATS


SHAPES = ShapeCounter()
_decision_by_bounds: Any = WeakIdKeyDictionary()


def decide_images(ends: torch.Tensor, longest: int, total: int) -> bool:
    """Whether images that end at `ends` (from 0 on) are of one length, and it came back.

    Decided once for a micro-batch: its boundaries are one tensor for all layers, also for those
    that are computed again.
    """
    if not torch.is_grad_enabled():
        return False
    if ends not in _decision_by_bounds:
        rows = len(ends) - 1
        is_even = rows * longest == total
        _decision_by_bounds[ends] = (
            is_even and total >= MIN_TOKENS and SHAPES.count_shape(rows, longest)
        )
    return bool(_decision_by_bounds[ends])


def attend_equal_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, rows: int, causal: bool
) -> torch.Tensor:
    """(T, N, D) of `rows` rows of one length, side by side."""
    q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
    return _cudnn(q, k, v, scaling, causal).transpose(1, 2).flatten(0, 1)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, causal: bool
) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )


class PaddedRows:
    """Causal rows in groups of about one length, each padded at its end to one of a few lengths.

    No token sees what comes after it, so none sees the padding, whatever it holds.
    """

    def __init__(self, groups: list[list[int]], lengths: Sequence[int], device: torch.device):
        self._shapes = [(len(rows), padded_length(rows, lengths)) for rows in groups]
        starts = np.cumsum([0, *lengths])
        places = np.empty(starts[-1], dtype=np.int64)
        tokens = np.zeros(sum(rows * length for rows, length in self._shapes), dtype=np.int64)
        at = 0
        for rows, (_, length) in zip(groups, self._shapes, strict=True):
            for row in rows:
                own = np.arange(starts[row], starts[row + 1])
                places[own] = at + np.arange(len(own))
                tokens[at : at + length] = starts[row]
                tokens[at : at + len(own)] = own
                at += length
        unused = np.setdiff1d(np.arange(len(tokens)), places)
        self._places, self._tokens, self._unused = (
            copy_to_device(index, device) for index in (places, tokens, unused)
        )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """(T, N, D) of q (T, N, D) and k, v (T, N or fewer, D)."""
        sizes = [rows * length for rows, length in self._shapes]
        qs, ks, vs = (_split(self._spread(x), sizes) for x in (q, k, v))
        parts = [
            attend_equal_rows(q, k, v, scaling, rows, causal=True)
            for (rows, _), q, k, v in zip(self._shapes, qs, ks, vs, strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        found: torch.Tensor = _UnpadTokens.apply(whole, self._places, self._tokens, self._unused)
        return found

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        spread: torch.Tensor = _PadTokens.apply(x, self._places, self._tokens)
        return spread


def _split(x: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    return [x] if len(sizes) == 1 else x.split(sizes)


class _PadTokens(torch.autograd.Function):
    """From tokens to places. Nothing comes back from padding: nobody looks at it, and its own
    outputs are not read. torch's own function does not know that, and would add."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _UnpadTokens(torch.autograd.Function):
    """From places back to tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        places: torch.Tensor,
        tokens: torch.Tensor,
        unused: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, unused)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tokens, unused = ctx.saved_tensors
        spread = grads[0].index_select(0, tokens).index_fill_(0, unused, 0)
        return spread, None, None, None


def build_padded_rows(
    lengths: Sequence[int], device: torch.device, plans: ShapeCounter = SHAPES
) -> PaddedRows | None:
    """None where padding costs too much, or where shapes did not come back."""
    groups = group_by_length(lengths)
    if len(groups) > MAX_GROUPS or sum(lengths) < MIN_TOKENS or not torch.is_grad_enabled():
        return None
    shapes = [(len(rows), padded_length(rows, lengths)) for rows in groups]
    pairs = sum(length * length for length in lengths)
    if sum(rows * length * length for rows, length in shapes) > MAX_PADDING_RATIO * pairs:
        return None
    # Each is counted, also where another has already said no.
    count_shape = [plans.count_shape(rows, length) for rows, length in shapes]
    return PaddedRows(groups, lengths, device) if all(count_shape) else None


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """The numbers of rows that are padded to the longest of them."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not groups or lengths[row] < MIN_LENGTH_RATIO * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups


def padded_length(rows: list[int], lengths: Sequence[int]) -> int:
    return -(-max(lengths[row] for row in rows) // ROW_BUCKET) * ROW_BUCKET
