"""Pixels where they are used: those of a micro-batch, while the one before it is computed.

    one that is computed | the next, if it fits as well | the first of the next batch, if small

What is ahead is made by a thread, within a number of bytes. What does not fit is made when its
turn comes, alone if need be: nothing waits for room that another has to give up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from sightline.errors import MediaError, PixelMismatch
from sightline.families.device_copy import round_pinned
from sightline.pixels import Materializer, widen_patches
from sightline.trainer.bad_media import add_location, build_pixel_mismatch
from sightline.wire.micro_batch import MicroBatch

AllocatePatches = Callable[[int, int], np.ndarray]
"""Allocate memory for a number of patches of a number of bytes each."""


def allocate_patches(num: int, values: int) -> np.ndarray:
    return np.empty((num, values), np.uint8)


@dataclass
class MicroBatchPixels:
    materializer: Materializer
    max_bytes: int = sys.maxsize
    """For this rank's micro-batches and the items that they are made of."""
    allocate: AllocatePatches = allocate_patches
    is_pinned: bool = False
    """Whether `allocate` page-locks what it gives, of which torch takes more."""
    keep: bool = False
    """Whether items that are made here go into the cache: where they do not, somebody before has
    put as many there as it takes, and those that are still to come would have to go."""
    peak_bytes: int = 0
    """The most that the patches of micro-batches have taken at once."""
    _held_bytes: int = 0
    _ahead: dict[int, Future[np.ndarray]] = field(default_factory=dict)
    """Patches that are being made, by the id of their micro-batch."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # One thread, so that the items of one micro-batch are under way at a time.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batch")

    @property
    def item_bytes(self) -> int:
        """For items that are under way at once; the rest is for micro-batches."""
        return self.max_bytes // 7

    def count_bytes(self, pack: MicroBatch) -> int:
        nbytes = pack.num_patches * self._get_width(pack) if pack.items else 0
        return round_pinned(nbytes) if self.is_pinned else nbytes

    def _get_width(self, pack: MicroBatch) -> int:
        return self.materializer.get_width(entry.item for entry in pack.items)

    def start(self, pack: MicroBatch, max_fraction: float = 1.0) -> None:
        """Begins to make the patches of a micro-batch that is to come, if there is room for them,
        and if they take no more than a fraction of it."""
        nbytes, room = self.count_bytes(pack), self.max_bytes - self.item_bytes
        with self._lock:
            if nbytes and nbytes <= min(room - self._held_bytes, int(room * max_fraction)):
                self._ahead[id(pack)] = self._submit(pack, nbytes)

    def take(self, pack: MicroBatch) -> np.ndarray | None:
        """The patches of a micro-batch, which count until `release`; None where it shows none."""
        if not pack.items:
            return None
        with self._lock:
            flight = self._ahead.pop(id(pack), None) or self._submit(pack, self.count_bytes(pack))
        return flight.result()

    def release(self, pack: MicroBatch) -> None:
        with self._lock:
            self._held_bytes -= self.count_bytes(pack)

    def _submit(self, pack: MicroBatch, nbytes: int) -> Future[np.ndarray]:
        self._held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        return self._pool.submit(self.stack, pack)

    def stack(self, pack: MicroBatch) -> np.ndarray:
        """The patches of a micro-batch's items one after the other, compared with the digests."""
        width = self._get_width(pack)
        stacked = self.allocate(pack.num_patches, width)
        at = 0
        flights = self.materializer.iterate(
            (entry.item for entry in pack.items), self.item_bytes, self.keep
        )
        for entry in pack.items:
            item, flight = next(flights)  # `zip` would hold the previous future meanwhile
            try:
                pixels = flight.result()
                if entry.pixel_digest is not None and entry.pixel_digest != pixels.digest:
                    raise build_pixel_mismatch(entry.pixel_digest, pixels.digest)
            except (MediaError, PixelMismatch) as error:
                # They were made before the batch was packed: what fails now stops all ranks.
                store = self.materializer.store
                raise add_location(error, entry.wanted_by, pack.step, item, store) from error
            stacked[at : at + item.num_patches] = widen_patches(
                pixels.patches, width, self.materializer.family
            )
            at += item.num_patches
            del pixels, flight
        return stacked
