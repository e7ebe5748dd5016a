"""Makes each micro-batch's pixels while the previous micro-batch is computed.

    in computation | the next one, if it fits | the first one of the next batch, if it is small

A thread makes pixels ahead of time, within a memory limit. Pixels that do not fit are made when
they are needed, even if they alone exceed the limit. So nothing ever waits for memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from sightline.errors import MediaError, PixelMismatch
from sightline.families.device_copy import allocate_rows, round_pinned
from sightline.pixels import Materializer, widen_patches
from sightline.trainer.bad_media import add_location, build_pixel_mismatch
from sightline.wire.micro_batch import MicroBatch


@dataclass
class MicroBatchPixels:
    materializer: Materializer
    max_bytes: int = sys.maxsize
    """Memory limit for this rank's micro-batches and their items."""
    allocate: Callable[[int, int], np.ndarray] = allocate_rows
    """Allocates memory for patches, given their number and the bytes of each."""
    is_pinned: bool = False
    """Whether `allocate` returns page-locked memory, whose size torch rounds up."""
    keep: bool = False
    """Whether items that are made here go into the cache. If rank 0 has already filled the cache,
    they would evict items that are still needed."""
    peak_bytes: int = 0
    """Peak memory of the patches of micro-batches."""
    _held_bytes: int = 0
    _ahead: dict[int, Future[np.ndarray]] = field(default_factory=dict)
    """Patches that are being made, by the id of their micro-batch."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # One thread, so that only one micro-batch's items are in progress at a time.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batch")

    @property
    def item_bytes(self) -> int:
        """Return the memory limit for items in progress. The rest is for micro-batches."""
        return self.max_bytes // 7

    def count_bytes(self, pack: MicroBatch) -> int:
        nbytes = pack.num_patches * self._get_width(pack) if pack.items else 0
        return round_pinned(nbytes) if self.is_pinned else nbytes

    def _get_width(self, pack: MicroBatch) -> int:
        return self.materializer.get_width(entry.item for entry in pack.items)

    def start(self, pack: MicroBatch, max_fraction: float = 1.0) -> None:
        """Start making the patches of a later micro-batch if they fit into the free memory, and
        into `max_fraction` of all memory for micro-batches."""
        nbytes, room = self.count_bytes(pack), self.max_bytes - self.item_bytes
        with self._lock:
            fits = nbytes <= min(room - self._held_bytes, int(room * max_fraction))
            if nbytes and fits and id(pack) not in self._ahead:
                self._ahead[id(pack)] = self._submit(pack, nbytes)

    def take(self, pack: MicroBatch) -> np.ndarray | None:
        """Return a micro-batch's patches, or None without images. They count until `release`."""
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
        """Return the patches of a micro-batch's items in order, checked against the digests."""
        width = self._get_width(pack)
        stacked = self.allocate(pack.num_patches, width)
        at = 0
        flights = self.materializer.iterate(
            (entry.item for entry in pack.items), self.item_bytes, self.keep
        )
        for entry in pack.items:
            item, flight = next(flights)  # `zip` would keep the previous future alive
            try:
                pixels = flight.result()
                if entry.pixel_digest is not None and entry.pixel_digest != pixels.digest:
                    raise build_pixel_mismatch(entry.pixel_digest, pixels.digest)
            except (MediaError, PixelMismatch) as error:
                # The items were good before packing. A failure now stops all ranks.
                store = self.materializer.store
                raise add_location(error, entry.wanted_by, pack.step, item, store) from error
            stacked[at : at + item.num_patches] = widen_patches(
                pixels.patches, width, self.materializer.family
            )
            at += item.num_patches
            del pixels, flight
        return stacked
