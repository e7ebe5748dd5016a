"""Ready batches over ranks: rank 0 makes pixels, packs and hands out; the others map its memory.

What does not fit there, or lies on another machine, a rank makes itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from sightline.errors import MediaError, Misaligned, PixelMismatch
from sightline.pack import CostModel, assign_to_ranks, build_empty_micro_batch
from sightline.pixels import Materializer, share_patches
from sightline.trainer.bad_media import add_location, build_pixel_mismatch
from sightline.trainer.feed import BatchPrefetcher, ReadyBatch, ReadyMicroBatch, StackPatches
from sightline.trainer.ranks import FollowerChannel, LeadChannel
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.rank_messages import RankAssignment, SharedPatches


@dataclass
class BatchDistributor:
    """Gives every other rank its share and keeps rank 0's."""

    lead: LeadChannel
    size: int
    price: CostModel
    max_shared_bytes: int
    """Of the patches of a batch that other ranks need."""

    def __call__(self, ready: ReadyBatch) -> ReadyBatch:
        packs = [micro_batch.batch for micro_batch in ready.micro_batches]
        places = assign_to_ranks(packs, self.size, self.price)
        shows = [
            any(at is not None and packs[at].items for at in beside)
            for beside in zip(*places, strict=True)
        ]
        given = {at for own in places[1:] for at in own}
        stacks = [m.patches if at in given else None for at, m in enumerate(ready.micro_batches)]
        with share_patches(stacks, self.max_shared_bytes) as laid:
            self.lead.send_shares(
                [
                    RankAssignment(
                        step=ready.step,
                        digest=ready.digest,
                        micro_batches=[None if at is None else packs[at] for at in own],
                        shows=shows,
                        held_out=ready.held_out,
                        laid=_select_patches(laid, own),
                    )
                    for own in places[1:]
                ]
            )
        axes = packs[0].positions.shape[0] if packs else 1
        mine = [
            replace(
                _build_empty(ready.step, axes) if at is None else ready.micro_batches[at],
                shows=show,
            )
            for at, show in zip(places[0], shows, strict=True)
        ]
        return replace(ready, micro_batches=mine)


def _select_patches(laid: SharedPatches | None, own: list[int | None]) -> SharedPatches | None:
    if laid is None:
        return None
    places = [None if at is None else laid.places[at] for at in own]
    return msgspec.structs.replace(laid, places=places)


class ShareFeed:
    """Iterates over a rank's ready shares, in step order, prepared one ahead by a thread."""

    def __init__(
        self,
        follow: FollowerChannel,
        materializer: Materializer,
        num_axes: int,
        next_step: int,
        stack: StackPatches = np.concatenate,
        watchdog: StallWatchdog | None = None,
    ) -> None:
        """`watchdog` watches the thread: the loop's own rests while it waits for a share."""
        self._follow, self._materializer = follow, materializer
        self._watchdog = watchdog or StallWatchdog()
        self._num_axes, self._next_step, self._stack = num_axes, next_step, stack
        self._ahead = BatchPrefetcher(self._batches())

    def __iter__(self) -> Iterator[ReadyBatch]:
        return iter(self._ahead)

    def _batches(self) -> Iterator[ReadyBatch]:
        for share, laid in self._follow.shares():
            self._watchdog.mark(f"preparing the share of step {share.step}")
            ready = self._prepare(share, laid)
            self._watchdog.rest()
            yield ready

    def _prepare(self, share: RankAssignment, laid: list[np.ndarray | None]) -> ReadyBatch:
        next_step = self._next_step - share.held_out
        if share.step != next_step:
            raise Misaligned(
                f"share of step {share.step} sent, step {next_step} is next",
                "resume the run with --resume",
            )
        self._next_step = share.step + 1
        began = time.monotonic()
        empty = _build_empty(share.step, self._num_axes)
        stacks = laid or [None] * len(share.micro_batches)
        made = [
            replace(empty if pack is None else self._ready_of(pack, stack), shows=show)
            for pack, show, stack in zip(share.micro_batches, share.shows, stacks, strict=True)
        ]
        return ReadyBatch(
            step=share.step,
            digest=share.digest,
            micro_batches=made,
            num_samples=0,
            num_slots=0,
            num_images=0,
            materialize_s=time.monotonic() - began,
            held_out=share.held_out,
        )

    def _ready_of(self, pack: MicroBatch, stack: np.ndarray | None) -> ReadyMicroBatch:
        if not pack.items:
            return ReadyMicroBatch(pack, None)
        if stack is None:
            return ReadyMicroBatch(pack, self._materialize(pack))
        if len(stack) != pack.num_patches:
            raise Misaligned(
                f"step {pack.step}: {len(stack)} patches laid for {pack.num_patches}",
                "this is a bug; keep batches/ and report it",
            )
        self._materializer.counts.mapped += len(pack.items)
        return ReadyMicroBatch(pack, self._stack([stack]))

    def _materialize(self, pack: MicroBatch) -> np.ndarray:
        flights = [self._materializer.submit(entry.item) for entry in pack.items]
        patches: list[np.ndarray] = []
        for entry, flight in zip(pack.items, flights, strict=True):
            try:
                pixels = flight.result()
                if entry.pixel_digest is not None and entry.pixel_digest != pixels.digest:
                    raise build_pixel_mismatch(entry.pixel_digest, pixels.digest)
            except (MediaError, PixelMismatch) as error:
                # Rank 0 has made these pixels: what fails now stops all ranks.
                store = self._materializer.store
                raise add_location(error, entry.wanted_by, pack.step, entry.item, store) from error
            patches.append(pixels.patches)
        return self._stack(patches)


def _build_empty(step: int, num_axes: int) -> ReadyMicroBatch:
    return ReadyMicroBatch(build_empty_micro_batch(step, num_axes), None)
