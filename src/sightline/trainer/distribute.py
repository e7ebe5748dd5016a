"""Distributes a batch over ranks: rank 0 packs it, and every rank makes its own pixels.

rank 0: ready batch k --assignments--> channel --assignment k--> rank r (own thread)
  waits for: every rank to receive its share       rank r makes its pixels one micro-batch ahead
  unblocked by: the listening threads              and compares them with rank 0's digests
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from sightline.families import Forward
from sightline.pack import CostModel, assign_to_ranks, build_empty_micro_batch
from sightline.trainer.feed import ReadyBatch, ReadyMicroBatch
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.ranks import FollowerChannel, LeadChannel
from sightline.wire.rank_messages import RankAssignment


def iterate_shares(
    batches: Iterable[ReadyBatch], channel: LeadChannel, dims: ParallelDims, price: CostModel
) -> Iterator[ReadyBatch]:
    """Yield rank 0's share of each batch, then announce the end to the other ranks."""
    for ready in batches:
        yield distribute(ready, channel, dims, price)
    channel.announce_end()


def distribute(
    ready: ReadyBatch, channel: LeadChannel, dims: ParallelDims, price: CostModel
) -> ReadyBatch:
    """Return rank 0's share of the batch once every other rank has received its own."""
    packs = [micro_batch.batch for micro_batch in ready.micro_batches]
    places: list[list[int | None]] = [[] for _ in range(dims.data)]
    minibatch_sizes = []
    for minibatch in ready.minibatches:
        shares = assign_to_ranks([packs[at] for at in minibatch], dims.data, price)
        minibatch_sizes.append(len(shares[0]))
        for own, share in zip(places, shares, strict=True):
            own += [None if at is None else minibatch[at] for at in share]
    runs_tower = [
        any(at is not None and packs[at].items for at in round_places)
        for round_places in zip(*places, strict=True)
    ]
    channel.send_shares(
        [
            RankAssignment(
                step=ready.step,
                digest=ready.digest,
                micro_batches=[None if at is None else packs[at] for at in places[share]],
                runs_tower=runs_tower,
                minibatch_sizes=minibatch_sizes,
                held_out=ready.held_out,
            )
            for share in dims.shares[1:]
        ]
    )
    axes = packs[0].positions.shape[0] if packs else 1
    empty = ReadyMicroBatch(build_empty_micro_batch(ready.step, axes, dims.context))
    mine = [
        replace(empty if at is None else ready.micro_batches[at], runs_tower=runs)
        for at, runs in zip(places[0], runs_tower, strict=True)
    ]
    return replace(ready, micro_batches=mine, minibatch_sizes=minibatch_sizes)


def read_shares(
    channel: FollowerChannel, pixels: MicroBatchPixels, num_axes: int, context: int = 1
) -> Iterator[ReadyBatch]:
    """Yield a rank's shares in step order, until rank 0 announces the end."""
    for share in channel.shares():
        empty = build_empty_micro_batch(share.step, num_axes, context)
        yield ReadyBatch(
            step=share.step,
            digest=share.digest,
            micro_batches=[
                ReadyMicroBatch(pack or empty, runs_tower=runs, pixels=pixels)
                for pack, runs in zip(share.micro_batches, share.runs_tower, strict=True)
            ],
            materialize_s=0.0,
            minibatch_sizes=share.minibatch_sizes,
            held_out=share.held_out,
        )


# Operations per matrix element: two forward (multiply, add) and four backward.
OPERATIONS = 6


def estimate_price(forward: Forward) -> CostModel:
    """Count the operations of this model.

    The matrices of text blocks count once per token, those of vision blocks per patch, those of
    mergers per visual token and the head per trained token. Attention counts pairs. All experts of
    a layer count.
    """
    seen = {id(parameter) for _, parameter in forward.vision_parameters()}
    blocks, model = forward.blocks(), cast(Any, forward.model)
    vision = [block for block in blocks if any(id(p) in seen for p in block.parameters())]
    text = [block for block in blocks if block not in vision]
    inside = sum(map(_count_matrix_elements, vision))
    return CostModel(
        token=OPERATIONS * sum(map(_count_matrix_elements, text)),
        # Attention scores and the weighted sum of values: one product of the block's width each.
        attended=2 * OPERATIONS * sum(map(_hidden_size, text)),
        trained=OPERATIONS * _count_matrix_elements(model.get_output_embeddings()),
        patch=OPERATIONS * (inside + _tower_outside_blocks(forward, vision)),
        attended_patch=2 * OPERATIONS * sum(map(_hidden_size, vision)),
    )


def _tower_outside_blocks(forward: Forward, blocks: Sequence[nn.Module]) -> float:
    """Return the tower's matrix elements per patch outside its blocks: convolution, mergers."""
    smallest = forward.blank_image()
    if smallest is None:
        return 0.0
    tables = [m for m in forward.model.modules() if isinstance(m, nn.Embedding)]
    apart = {id(p) for module in (*blocks, *tables) for p in module.parameters()}
    own = [p for _, p in forward.vision_parameters() if id(p) not in apart]
    # A patch embedding is a convolution. The smallest image is one visual token.
    embed = sum(p.numel() for p in own if p.ndim > 2)
    return embed + sum(p.numel() for p in own if p.ndim == 2) / math.prod(smallest[1])


def _count_matrix_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.ndim > 1)


def _hidden_size(block: nn.Module) -> int:
    """Return the hidden size: a block's last vector is a norm's weight or a bias of this size."""
    vectors = [p.numel() for p in block.parameters() if p.ndim == 1]
    return vectors[-1] if vectors else 0
