"""Ulysses: ranks divide the tokens of a row everywhere but in attention, where they divide heads.

    rank r: tokens [start_r, stop_r), all heads --all to all--> all tokens, heads of r --attend-->
    --all to all--> tokens [start_r, stop_r), all heads

Attention still sees the whole row, so flat packs and trees need no changes. The ranks of a group
call every layer in the same order. Dimensions: H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from sightline.compute.attention import AttentionPattern
from sightline.compute.attention_shapes import Attended, Keys, Queries, Values

Share = Float[Tensor, "1 heads tokens width"]


class ContextPattern:
    """Attention over a row whose tokens are divided among the ranks of a group."""

    state = None

    def __init__(self, whole: AttentionPattern, group: dist.ProcessGroup, num_tokens: int) -> None:
        self._whole = whole
        self._group = group
        bounds = divide(num_tokens, group.size())
        self._counts = [stop - start for start, stop in bounds]

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        q, k, v = (_gather_tokens(x, self._group, self._counts) for x in (q, k, v))
        out = self._whole.attend(layer, q, k, v, scaling)
        return _gather_heads(out, self._group, self._counts)


def divide(num_tokens: int, size: int) -> list[tuple[int, int]]:
    ends = [num_tokens * rank // size for rank in range(size + 1)]
    return list(zip(ends, ends[1:], strict=False))


def join_scores(
    scores: Float[Tensor, " own"],
    places: Int[Tensor, " own"],
    num_tokens: int,
    group: dist.ProcessGroup,
) -> Float[Tensor, " tokens"]:
    """Return the scores of all ranks. `places` are the places of this rank's own scores.

    Every rank computes the same loss from them, so the gradient of a score is its own rank's.
    """
    return _JoinScores.apply(scores, places, num_tokens, group)


class _JoinScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, places: Tensor, num_tokens: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(places)
        joined = scores.new_zeros(num_tokens).index_copy_(0, places, scores)
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None, None


def _gather_tokens(x: Share, group: dist.ProcessGroup, counts: Sequence[int]) -> Share:
    """Exchange this rank's tokens of all heads for all tokens of its heads."""
    heads, width = x.shape[1] // group.size(), x.shape[-1]
    shapes = [(1, heads, count, width) for count in counts]
    return torch.cat(_exchange(x.chunk(group.size(), dim=1), shapes, group), dim=2)


def _gather_heads(x: Share, group: dist.ProcessGroup, counts: Sequence[int]) -> Share:
    """Exchange all tokens of this rank's heads for its tokens of all heads."""
    shape = (1, x.shape[1], counts[group.rank()], x.shape[-1])
    parts = x.split(list(counts), dim=2)
    return torch.cat(_exchange(parts, [shape] * group.size(), group), dim=1)


def _exchange(
    parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send part i to rank i. Return the parts of all ranks, with the given shapes."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    num_sent = [part.numel() for part in parts]
    received = all_to_all_single(sent.new_empty(sum(sizes)), sent, sizes, num_sent, group)
    return [flat.view(shape) for flat, shape in zip(received.split(sizes), shapes, strict=True)]
