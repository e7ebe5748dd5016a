"""The urls that a conversation has shown: its history costs a hash when it comes again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sightline.media.ingest import hash_url
from sightline.media.ref import MediaRef
from sightline.media.store import MediaStore


class UrlRefCache:
    """Asks `resolve` for a url, of whatever scheme, once; holds a key and a ref for each.

    An address whose image changes later keeps its first meaning: history does not change by being
    sent again. Safe among threads.
    """

    def __init__(self, resolve: Callable[[str, str], MediaRef], store: MediaStore) -> None:
        self._resolve = resolve
        self._store = store
        self._refs: dict[bytes, MediaRef] = {}
        self._lock = threading.Lock()

    def resolve(self, url: str, path: str) -> MediaRef:
        """The ref of the image at `url`; errors name `path`, and nothing is kept of them."""
        key = hash_url(url)
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
