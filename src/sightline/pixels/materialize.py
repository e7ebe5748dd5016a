"""The pool that turns items into patches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from cachetools import LRUCache

from sightline.errors import SightlineError
from sightline.families import Family
from sightline.media import MediaRef, MediaStore, decode
from sightline.media.video import VideoReaders
from sightline.pixels.pixels import Pixels, pixel_digest
from sightline.pixels.shared_patches import SharedPatches
from sightline.wire import MediaItem

WARM_TIMEOUT_S = 60.0


@dataclass
class PixelCacheStats:
    """What the pool has done; reset by nobody, read by metrics."""

    made: int = 0
    hits: int = 0
    joined: int = 0
    """Asked for while another caller's flight was under way."""
    evicted: int = 0
    failed: int = 0
    oversized: int = 0
    bytes_held: int = 0

    def totals(self) -> dict[str, float]:
        """What only grows, by the names of metrics."""
        return {
            "images_made": self.made,
            "images_failed": self.failed,
            "pixel_cache_hits": self.hits,
            "pixel_cache_joined": self.joined,
            "pixel_cache_evicted": self.evicted,
            "pixel_cache_oversized": self.oversized,
        }

    def figures(self) -> dict[str, int]:
        """By the names that the metrics of every cache have."""
        return {
            "hits": self.hits + self.joined,
            "misses": self.made + self.failed,
            "evictions": self.evicted,
            "bytes": self.bytes_held,
        }


@dataclass
class Materializer:
    """Safe for many threads.

    Several callers may wait for one flight: whoever can be cancelled waits for it shielded.
    """

    family: Family
    store: MediaStore
    max_bytes: int
    threads: int = 1
    counts: PixelCacheStats = field(default_factory=PixelCacheStats)
    shared: SharedPatches | None = None
    """A cache that other processes use too, beside this one's own of `max_bytes`."""

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="pixels")
        self._lock = threading.Lock()
        self._videos = VideoReaders(self.store.get, self.store.limits)
        # By the whole item, not its key: one that lies about its image's size fails alone, and
        # finds nothing that was made for the true one.
        self._cache: LRUCache[MediaItem, Pixels] = LRUCache(
            self.max_bytes, getsizeof=lambda pixels: pixels.patches.nbytes
        )
        self._flights: dict[MediaItem, Future[Pixels]] = {}

    def warm_up(self) -> None:
        """Starts the threads and takes a small picture through each; returns when all have."""
        together = threading.Barrier(self.threads)

        def one() -> None:
            together.wait(WARM_TIMEOUT_S)  # a thread that was done could take a second turn
            _ = self._count_values()

        for started in [self._pool.submit(one) for _ in range(self.threads)]:
            started.result()

    def _count_values(self) -> int:
        """Bytes of a patch, from a small picture."""
        image = decode.warm_up()
        if not self.family.shows_media:
            return 0
        ref = MediaRef("0" * 64, "image/png", image.width, image.height, 1)
        return int(self.family.patches(image, self.family.item(ref)).shape[1])

    @cached_property
    def patch_bytes(self) -> int:
        """Bytes of a patch of an image."""
        return self._count_values()

    def count_bytes(self, item: MediaItem) -> int:
        """Bytes of an item's patches."""
        return item.num_patches * item.patch_frames * self.patch_bytes

    def get_width(self, items: Iterable[MediaItem]) -> int:
        """Bytes of a patch where these are stacked: that of the widest."""
        return self.patch_bytes * max((item.patch_frames for item in items), default=1)

    def iterate(
        self, items: Iterable[MediaItem], max_bytes: int, keep: bool = True
    ) -> Iterator[tuple[MediaItem, Future[Pixels]]]:
        """Every item with its flight, in their order; no more than `max_bytes` of them are under
        way, or held, at once: one at least. An item that is refused is a flight that failed."""
        ahead: deque[tuple[MediaItem, Future[Pixels]]] = deque()
        held = 0
        for item in items:
            nbytes = self.count_bytes(item)
            while ahead and held + nbytes > max_bytes:
                held -= self.count_bytes(ahead[0][0])
                yield ahead.popleft()
            held += nbytes
            try:
                flight = self.submit(item, keep)
            except SightlineError as error:
                flight = Future()
                flight.set_exception(error)
            ahead.append((item, flight))
            del flight  # what was taken from here is held by the taker alone
        while ahead:
            yield ahead.popleft()

    def submit(self, item: MediaItem, keep: bool = True) -> Future[Pixels]:
        """The pixels of `item`, soon. The family's check of the item comes first.

        With `keep` they go into the cache, if they were not there.
        """
        self.family.check_item(item)
        with self._lock:
            if (pixels := self._cache.get(item)) is not None:
                self.counts.hits += 1
                done: Future[Pixels] = Future()
                done.set_result(pixels)
                return done
            if (flight := self._flights.get(item)) is not None:
                self.counts.joined += 1
                return flight
            flight = self._pool.submit(self._make, item, keep)
            self._flights[item] = flight
        flight.add_done_callback(lambda _: self._finish_flight(item))
        return flight

    def get(self, item: MediaItem) -> Pixels:
        return self.submit(item).result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, item: MediaItem, keep: bool) -> Pixels:
        if self.shared is not None and (found := self.shared.find(item)) is not None:
            with self._lock:
                self.counts.hits += 1
            return found
        try:
            patches = self._make_patches(item)
            pixels = Pixels(patches, pixel_digest(item, patches))
        except BaseException:
            with self._lock:
                self.counts.failed += 1
            raise
        if keep and self.shared is not None:
            self.shared.add(item, pixels)
        with self._lock:
            self.counts.made += 1
            if not keep:
                return pixels
            if self.shared is not None:
                self.counts.bytes_held = self.shared.bytes_held
            if patches.nbytes > self.max_bytes:
                self.counts.oversized += self.max_bytes > 0
                return pixels
            num_before = len(self._cache)
            self._cache[item] = pixels
            self.counts.evicted += num_before + 1 - len(self._cache)
            self.counts.bytes_held = int(self._cache.currsize)
        return pixels

    def _make_patches(self, item: MediaItem) -> np.ndarray:
        step = item.step
        if step is None:
            return self.family.patches(self.store.image(item.ref), item)
        if step.frames:
            return self.family.step_patches(self._videos.read(item.ref, step.frames), item)
        return self.family.step_patches([self.store.image(ref) for ref in item.refs], item)

    def _finish_flight(self, item: MediaItem) -> None:
        with self._lock:
            self._flights.pop(item, None)
