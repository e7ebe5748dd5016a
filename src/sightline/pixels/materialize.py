"""The thread pool that turns media items into patches."""

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
from sightline.pixels.pixels import Pixels, SharedPatches, pixel_digest
from sightline.wire import MediaItem

WARM_TIMEOUT_S = 60.0


@dataclass
class PixelCacheStats:
    """Counters for metrics. Never reset."""

    made: int = 0
    hits: int = 0
    joined: int = 0
    """Requests that joined a computation in progress."""
    evicted: int = 0
    failed: int = 0
    bytes_held: int = 0

    def totals(self) -> dict[str, float]:
        """Return the monotonic counters by metric name."""
        return {
            "images_made": self.made,
            "images_failed": self.failed,
            "pixel_cache_hits": self.hits,
            "pixel_cache_joined": self.joined,
            "pixel_cache_evicted": self.evicted,
        }

    def figures(self) -> dict[str, int]:
        """Return the cache's statistics, under the metric names that all caches share."""
        return {
            "hits": self.hits + self.joined,
            "misses": self.made + self.failed,
            "evictions": self.evicted,
            "bytes": self.bytes_held,
        }


@dataclass
class Materializer:
    """Turns media items into patches, with a cache. Thread-safe.

    Several callers may share one future, so a caller that can be cancelled must shield it.
    """

    family: Family
    store: MediaStore
    max_bytes: int
    threads: int = 1
    counts: PixelCacheStats = field(default_factory=PixelCacheStats)
    shared: SharedPatches | None = None
    """A cache shared with other processes, in addition to this one of `max_bytes`."""

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="pixels")
        self._lock = threading.Lock()
        self._videos = VideoReaders(self.store.get, self.store.limits)
        # Keyed by the whole item, so that an item with a wrong size never finds the pixels of the
        # right one.
        self._cache: LRUCache[MediaItem, Pixels] = LRUCache(
            self.max_bytes, getsizeof=lambda pixels: pixels.patches.nbytes
        )
        self._in_progress: dict[MediaItem, Future[Pixels]] = {}

    def warm_up(self) -> None:
        """Start all threads and process a small image in each."""
        barrier = threading.Barrier(self.threads)

        def warm_thread() -> None:
            barrier.wait(WARM_TIMEOUT_S)  # otherwise a fast thread could run twice
            _ = self._count_values()

        for future in [self._pool.submit(warm_thread) for _ in range(self.threads)]:
            future.result()

    def _count_values(self) -> int:
        """Return the bytes of a patch, measured on a small image."""
        image = decode.warm_up()
        if not self.family.shows_media:
            return 0
        ref = MediaRef("0" * 64, "image/png", image.width, image.height, 1)
        return int(self.family.patches(image, self.family.item(ref)).shape[1])

    @cached_property
    def patch_bytes(self) -> int:
        """Bytes of one patch of an image."""
        return self._count_values()

    def count_bytes(self, item: MediaItem) -> int:
        """Return the bytes of an item's patches."""
        return item.num_patches * item.patch_frames * self.patch_bytes

    def get_width(self, items: Iterable[MediaItem]) -> int:
        """Return the bytes of a patch when these items are stacked. The widest item decides."""
        return self.patch_bytes * max((item.patch_frames for item in items), default=1)

    def iterate(
        self, items: Iterable[MediaItem], max_bytes: int, keep: bool = True
    ) -> Iterator[tuple[MediaItem, Future[Pixels]]]:
        """Yield every item with the future of its pixels, in order.

        At most `max_bytes` are in progress or held at once, but always at least one item. A refused
        item yields a failed future.
        """
        ahead: deque[tuple[MediaItem, Future[Pixels]]] = deque()
        ahead_bytes = 0
        for item in items:
            nbytes = self.count_bytes(item)
            while ahead and ahead_bytes + nbytes > max_bytes:
                ahead_bytes -= self.count_bytes(ahead[0][0])
                yield ahead.popleft()
            ahead_bytes += nbytes
            try:
                future = self.submit(item, keep)
            except SightlineError as error:
                future = Future()
                future.set_exception(error)
            ahead.append((item, future))
            del future  # so that only the consumer keeps the pixels alive
        while ahead:
            yield ahead.popleft()

    def submit(self, item: MediaItem, keep: bool = True) -> Future[Pixels]:
        """Check `item` and return the future of its pixels. `keep` adds them to the cache."""
        self.family.check_item(item)
        with self._lock:
            if (pixels := self._cache.get(item)) is not None:
                self.counts.hits += 1
                done: Future[Pixels] = Future()
                done.set_result(pixels)
                return done
            if (future := self._in_progress.get(item)) is not None:
                self.counts.joined += 1
                return future
            future = self._pool.submit(self._make, item, keep)
            self._in_progress[item] = future
        future.add_done_callback(lambda _: self._forget(item))
        return future

    def get(self, item: MediaItem) -> Pixels:
        return self.submit(item).result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, item: MediaItem, keep: bool) -> Pixels:
        if self.shared is not None and (pixels := self.shared.find(item)) is not None:
            with self._lock:
                self.counts.hits += 1
            return pixels
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

    def _forget(self, item: MediaItem) -> None:
        with self._lock:
            self._in_progress.pop(item, None)
