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

from sightline.compute.transfer import send

RETURNS = 3
"""The micro-batch with a shape from which on it has a plan."""
MIN_TOKENS = 2048
"""Of a pack; with fewer there is little to save."""
LIKE = 0.8
"""Of the longest: shorter rows are not padded to it."""
MAX_GROUPS = 4
MAX_PADDED = 1.3
"""Pairs of attention with padding over pairs without."""
BUCKET = 256
"""Padded rows have a multiple of so many tokens, so that shapes come back."""


class Plans:
    """Which shapes came back, of the last so many."""

    def __init__(self, kept: int = 4096) -> None:
        self._seen: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._kept = kept

    def worth(self, rows: int, length: int) -> bool:
        """Whether the shape has been asked for often enough, this time counted."""
        shape = (rows, length)
        self._seen[shape] = self._seen.pop(shape, 0) + 1
        if len(self._seen) > self._kept:
            self._seen.popitem(last=False)
        return self._seen[shape] >= RETURNS


PLANS = Plans()
_decided: Any = WeakIdKeyDictionary()


def takes_images(ends: torch.Tensor, longest: int, total: int) -> bool:
    """Whether images that end at `ends` (from 0 on) are of one length, and it came back.

    Decided once for a micro-batch: its boundaries are one tensor for all layers, also for those
    that are computed again.
    """
    if not torch.is_grad_enabled():
        return False
    if ends not in _decided:
        rows = len(ends) - 1
        is_even = rows * longest == total
        _decided[ends] = is_even and total >= MIN_TOKENS and PLANS.worth(rows, longest)
    return bool(_decided[ends])


def attend_even(
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


class Padded:
    """Causal rows in groups of about one length, each padded at its end to one of a few lengths.

    No token sees what comes after it, so none sees the padding.
    """

    def __init__(self, groups: list[list[int]], lengths: Sequence[int], device: torch.device):
        self._shapes = [(len(rows), padded_length(rows, lengths)) for rows in groups]
        self._num = sum(rows * length for rows, length in self._shapes)
        starts = np.cumsum([0, *lengths])
        places, at = np.empty(starts[-1], dtype=np.int64), 0
        for rows, (_, length) in zip(groups, self._shapes, strict=True):
            for row in rows:
                places[starts[row] : starts[row + 1]] = at + np.arange(lengths[row])
                at += length
        self._places = send(places, device)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """(T, N, D) of q (T, N, D) and k, v (T, N or fewer, D)."""
        sizes = [rows * length for rows, length in self._shapes]
        qs, ks, vs = (
            x.new_zeros(self._num, *x.shape[1:]).index_copy(0, self._places, x).split(sizes)
            for x in (q, k, v)
        )
        parts = [
            attend_even(q, k, v, scaling, rows, causal=True)
            for (rows, _), q, k, v in zip(self._shapes, qs, ks, vs, strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        found: torch.Tensor = _Collect.apply(whole, self._places)
        return found


class _Collect(torch.autograd.Function):
    """Rows by distinct places. torch's own adds in the backward pass, as if places could repeat."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (places,) = ctx.saved_tensors
        (grad,) = grads
        return grad.new_zeros(ctx.num, *grad.shape[1:]).index_copy_(0, places, grad), None


def padded_rows(
    lengths: Sequence[int], device: torch.device, plans: Plans = PLANS
) -> Padded | None:
    """None where padding costs too much, or where shapes did not come back."""
    groups = groups_of(lengths)
    if len(groups) > MAX_GROUPS or sum(lengths) < MIN_TOKENS or not torch.is_grad_enabled():
        return None
    shapes = [(len(rows), padded_length(rows, lengths)) for rows in groups]
    pairs = sum(length * length for length in lengths)
    if sum(rows * length * length for rows, length in shapes) > MAX_PADDED * pairs:
        return None
    # Each is counted, also where another has already said no.
    worth = [plans.worth(rows, length) for rows, length in shapes]
    return Padded(groups, lengths, device) if all(worth) else None


def groups_of(lengths: Sequence[int]) -> list[list[int]]:
    """The numbers of rows that are padded to the longest of them."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not groups or lengths[row] < LIKE * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups


def padded_length(rows: list[int], lengths: Sequence[int]) -> int:
    return -(-max(lengths[row] for row in rows) // BUCKET) * BUCKET
