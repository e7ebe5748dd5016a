"""Ready batches over ranks: rank 0 packs and hands out, the others make their own pixels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sightline.errors import MediaError, Misaligned, PixelMismatch
from sightline.pack import empty_micro_batch, spread
from sightline.pixels import Materializer
from sightline.trainer.bad_media import mismatch, named
from sightline.trainer.feed import Ahead, ReadyBatch, ReadyMicroBatch
from sightline.trainer.ranks import Follow, Lead
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.share import Share


@dataclass
class Spread:
    """Gives every other rank its share and keeps rank 0's."""

    lead: Lead
    size: int

    def __call__(self, ready: ReadyBatch) -> ReadyBatch:
        packs = [micro_batch.batch for micro_batch in ready.micro_batches]
        places = spread(packs, self.size)
        shows = [
            any(at is not None and packs[at].items for at in beside)
            for beside in zip(*places, strict=True)
        ]
        self.lead.give(
            [
                Share(
                    step=ready.step,
                    digest=ready.digest,
                    micro_batches=[None if at is None else packs[at] for at in own],
                    shows=shows,
                    held_out=ready.held_out,
                )
                for own in places[1:]
            ]
        )
        axes = packs[0].positions.shape[0] if packs else 1
        mine = [
            replace(_empty(ready.step, axes) if at is None else ready.micro_batches[at], shows=show)
            for at, show in zip(places[0], shows, strict=True)
        ]
        return replace(ready, micro_batches=mine)


class ShareFeed:
    """Iterates over a rank's ready shares, in step order, prepared one ahead by a thread."""

    def __init__(
        self, follow: Follow, materializer: Materializer, num_axes: int, next_step: int
    ) -> None:
        self._follow, self._materializer = follow, materializer
        self._num_axes, self._next_step = num_axes, next_step
        self._ahead = Ahead(self._batches())

    def __iter__(self) -> Iterator[ReadyBatch]:
        return iter(self._ahead)

    def _batches(self) -> Iterator[ReadyBatch]:
        for share in self._follow.shares():
            yield self._prepare(share)

    def _prepare(self, share: Share) -> ReadyBatch:
        next_step = self._next_step - share.held_out
        if share.step != next_step:
            raise Misaligned(
                f"share of step {share.step} sent, step {next_step} is next",
                "resume the run with --resume",
            )
        self._next_step = share.step + 1
        began = time.monotonic()
        empty = _empty(share.step, self._num_axes)
        made = [
            replace(empty if pack is None else self._materialize(pack), shows=show)
            for pack, show in zip(share.micro_batches, share.shows, strict=True)
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

    def _materialize(self, pack: MicroBatch) -> ReadyMicroBatch:
        if not pack.items:
            return ReadyMicroBatch(pack, None)
        flights = [self._materializer.submit(entry.item) for entry in pack.items]
        patches: list[np.ndarray] = []
        for entry, flight in zip(pack.items, flights, strict=True):
            try:
                pixels = flight.result()
                if entry.pixel_digest is not None and entry.pixel_digest != pixels.digest:
                    raise mismatch(entry.pixel_digest, pixels.digest)
            except (MediaError, PixelMismatch) as error:
                # Rank 0 has made these pixels: what fails now stops all ranks.
                store = self._materializer.store
                raise named(error, entry.wanted_by, pack.step, entry.item, store) from error
            patches.append(pixels.patches)
        return ReadyMicroBatch(pack, np.concatenate(patches))


def _empty(step: int, num_axes: int) -> ReadyMicroBatch:
    return ReadyMicroBatch(empty_micro_batch(step, num_axes), None)
