"""A ready batch over ranks: rank 0 packs and hands out, every rank makes the pixels of its share.

rank 0: ready batch k --assignments--> channel --assignment k--> rank r (own thread)
  waits for: every rank to receive its share       rank r makes its pixels, one batch ahead
  unblocked by: the threads that listen            and compares them with rank 0's digests
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from sightline.errors import MediaError, PixelMismatch
from sightline.pack import CostModel, assign_to_ranks, build_empty_micro_batch
from sightline.pixels import Materializer
from sightline.trainer.bad_media import add_location, build_pixel_mismatch
from sightline.trainer.feed import ReadyBatch, ReadyMicroBatch, StackPatches
from sightline.trainer.ranks import FollowerChannel, LeadChannel
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.rank_messages import RankAssignment


@dataclass
class BatchDistributor:
    """Gives every other rank its share and keeps rank 0's."""

    channel: LeadChannel
    size: int
    price: CostModel

    def iterate_shares(self, batches: Iterable[ReadyBatch]) -> Iterator[ReadyBatch]:
        """Rank 0's share of each batch; the other ranks are told when there are no more."""
        yield from map(self.distribute, batches)
        self.channel.announce_end()

    def distribute(self, ready: ReadyBatch) -> ReadyBatch:
        """Rank 0's share of the batch; returns when every other rank has received its own."""
        packs = [micro_batch.batch for micro_batch in ready.micro_batches]
        places = assign_to_ranks(packs, self.size, self.price)
        runs_tower = [
            any(at is not None and packs[at].items for at in beside)
            for beside in zip(*places, strict=True)
        ]
        self.channel.send_shares(
            [
                RankAssignment(
                    step=ready.step,
                    digest=ready.digest,
                    micro_batches=[None if at is None else packs[at] for at in own],
                    runs_tower=runs_tower,
                    held_out=ready.held_out,
                )
                for own in places[1:]
            ]
        )
        axes = packs[0].positions.shape[0] if packs else 1
        empty = ReadyMicroBatch(build_empty_micro_batch(ready.step, axes), None)
        mine = [
            replace(empty if at is None else ready.micro_batches[at], runs_tower=runs)
            for at, runs in zip(places[0], runs_tower, strict=True)
        ]
        return replace(ready, micro_batches=mine)


@dataclass
class ShareReader:
    """Iterates over a rank's ready shares, in step order, until rank 0 announces the end."""

    channel: FollowerChannel
    materializer: Materializer
    num_axes: int
    stack: StackPatches = np.concatenate
    watchdog: StallWatchdog = field(default_factory=StallWatchdog)
    """Watches the thread that iterates: the loop's own is idle while it waits for a share."""

    def __iter__(self) -> Iterator[ReadyBatch]:
        for share in self.channel.shares():
            self.watchdog.enter(f"preparing the share of step {share.step}")
            ready = self._prepare(share)
            self.watchdog.idle()
            yield ready

    def _prepare(self, share: RankAssignment) -> ReadyBatch:
        began = time.monotonic()
        empty = build_empty_micro_batch(share.step, self.num_axes)
        packs = [pack or empty for pack in share.micro_batches]
        made = [
            ReadyMicroBatch(pack, self._materialize(pack) if pack.items else None, runs)
            for pack, runs in zip(packs, share.runs_tower, strict=True)
        ]
        return ReadyBatch(
            step=share.step,
            digest=share.digest,
            micro_batches=made,
            materialize_s=time.monotonic() - began,
            held_out=share.held_out,
        )

    def _materialize(self, pack: MicroBatch) -> np.ndarray:
        flights = [self.materializer.submit(entry.item) for entry in pack.items]
        patches: list[np.ndarray] = []
        for entry, flight in zip(pack.items, flights, strict=True):
            try:
                pixels = flight.result()
                if entry.pixel_digest is not None and entry.pixel_digest != pixels.digest:
                    raise build_pixel_mismatch(entry.pixel_digest, pixels.digest)
            except (MediaError, PixelMismatch) as error:
                # Rank 0 has made these pixels: what fails now stops all ranks.
                store = self.materializer.store
                raise add_location(error, entry.wanted_by, pack.step, entry.item, store) from error
            patches.append(pixels.patches)
        return self.stack(patches)
