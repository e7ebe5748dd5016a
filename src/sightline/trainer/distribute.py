"""Distributes a batch over ranks: rank 0 packs it, and every rank makes its own pixels.

rank 0: ready batch k --assignments--> channel --assignment k--> rank r (own thread)
  waits for: every rank to receive its share       rank r makes its pixels one micro-batch ahead
  unblocked by: the listening threads              and compares them with rank 0's digests
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sightline.pack import CostModel, assign_to_ranks, build_empty_micro_batch
from sightline.trainer.feed import ReadyBatch, ReadyMicroBatch
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.ranks import FollowerChannel, LeadChannel
from sightline.wire.rank_messages import RankAssignment


@dataclass
class BatchDistributor:
    """Sends every other rank its share of a batch and keeps rank 0's."""

    channel: LeadChannel
    dims: ParallelDims
    price: CostModel

    def iterate_shares(self, batches: Iterable[ReadyBatch]) -> Iterator[ReadyBatch]:
        """Yield rank 0's share of each batch, then announce the end to the other ranks."""
        yield from map(self.distribute, batches)
        self.channel.announce_end()

    def distribute(self, ready: ReadyBatch) -> ReadyBatch:
        """Return rank 0's share of the batch once every other rank has received its own."""
        packs = [micro_batch.batch for micro_batch in ready.micro_batches]
        places: list[list[int | None]] = [[] for _ in range(self.dims.data)]
        minibatch_sizes = []
        for minibatch in ready.minibatches:
            shares = assign_to_ranks([packs[at] for at in minibatch], self.dims.data, self.price)
            minibatch_sizes.append(len(shares[0]))
            for own, share in zip(places, shares, strict=True):
                own += [None if at is None else minibatch[at] for at in share]
        runs_tower = [
            any(at is not None and packs[at].items for at in round_places)
            for round_places in zip(*places, strict=True)
        ]
        self.channel.send_shares(
            [
                RankAssignment(
                    step=ready.step,
                    digest=ready.digest,
                    micro_batches=[None if at is None else packs[at] for at in rank_places],
                    runs_tower=runs_tower,
                    minibatch_sizes=minibatch_sizes,
                    held_out=ready.held_out,
                )
                for rank_places in places[1:]
            ]
        )
        axes = packs[0].positions.shape[0] if packs else 1
        empty = ReadyMicroBatch(build_empty_micro_batch(ready.step, axes))
        mine = [
            replace(empty if at is None else ready.micro_batches[at], runs_tower=runs)
            for at, runs in zip(places[0], runs_tower, strict=True)
        ]
        return replace(ready, micro_batches=mine, minibatch_sizes=minibatch_sizes)


@dataclass
class ShareReader:
    """Iterates over a rank's shares in step order, until rank 0 announces the end."""

    channel: FollowerChannel
    pixels: MicroBatchPixels
    num_axes: int

    def __iter__(self) -> Iterator[ReadyBatch]:
        return map(self._prepare, self.channel.shares())

    def _prepare(self, share: RankAssignment) -> ReadyBatch:
        empty = build_empty_micro_batch(share.step, self.num_axes)
        packs = [pack or empty for pack in share.micro_batches]
        return ReadyBatch(
            step=share.step,
            digest=share.digest,
            micro_batches=[
                ReadyMicroBatch(pack, runs_tower=runs, pixels=self.pixels)
                for pack, runs in zip(packs, share.runs_tower, strict=True)
            ],
            materialize_s=0.0,
            minibatch_sizes=share.minibatch_sizes,
            held_out=share.held_out,
        )
