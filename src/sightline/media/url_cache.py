"""The urls that were shown before: history costs a hash when it comes again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from hashlib import sha256

from cachetools import LRUCache

from sightline.media.ref import MediaRef
from sightline.media.store import MediaStore


class UrlRefCache:
    """Asks `resolve` for a url, of whatever scheme, once; holds a hash and a ref for each.

    An address whose image changes later keeps its first meaning: history does not change by being
    sent again. Past `max_urls` those used longest ago are forgotten. Safe among threads.
    """

    def __init__(
        self,
        resolve: Callable[[str, str], MediaRef],
        store: MediaStore,
        max_urls: float = math.inf,
    ) -> None:
        self._resolve = resolve
        self._store = store
        self._refs: LRUCache[bytes, MediaRef] = LRUCache(max_urls)
        self._lock = threading.Lock()

    def resolve(self, url: str, path: str) -> MediaRef:
        """The ref of the image at `url`; errors name `path`, and nothing is kept of them."""
        key = sha256(url.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            seen = self._refs.get(key)
        # An image that was swept from the store meanwhile must be had again.
        if seen is not None and self._store.touch(seen.digest):
            return seen
        found = self._resolve(url, path)
        with self._lock:
            # Of two requests that bring a new url at the same time, the first says what it shows.
            if self._refs.get(key) is seen:
                self._refs[key] = found
            return self._refs[key]

    def __len__(self) -> int:
        return len(self._refs)
