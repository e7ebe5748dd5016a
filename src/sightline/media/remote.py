"""Stores without a shared disk: the `Remote` protocol, and the store built on it.

put --> remote, confirmed --> cache
get --> cache --miss--> remote --verified--> cache
  both wait for: the remote, with retries   unblocked by: its answer, a deadline
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from cachetools import TTLCache

from sightline.errors import MediaCorrupt, MediaError
from sightline.media import decode, files
from sightline.media.cache import DiskCache
from sightline.media.header import ImageLimits
from sightline.media.ref import MediaRef, check_digest, verify_bytes
from sightline.media.store import MediaStore, Unavailable

DEADLINE_S = 60.0
"""Seconds after the first failure during which a request is retried."""
START_DEADLINE_S = 10.0
"""The same at the start of a run or a command, when the address may be wrong."""
TIMEOUT_S = 30.0
"""Timeout of one attempt."""
WARN_AFTER_S = 1.0
"""Seconds of failures before a warning, which is printed at most every WARN_EVERY_S."""
WARN_EVERY_S = 60.0
DEFAULT_CACHE_BYTES = 10 * 10**9
DEFAULT_CACHE_DIR = "~/.cache/sightline/media"

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_NUM_READS = 3  # attempts if the bytes do not match their digest: the network may have damaged them
_NUM_PREFETCH_THREADS = 16
_MAX_CONFIRMED = 262_144
_warned_at: dict[str, float] = {}

Value = TypeVar("Value")


class Remote(Protocol):
    """A service or an object store. Every call is one attempt, and raises `Unavailable` if a retry
    may help."""

    address: str
    deadline_s: float

    def read(self, digest: str) -> bytes | None:
        """Return the bytes, unverified, or None."""

    def write(self, digest: str, data: bytes) -> bool:
        """Store the bytes durably, with their last use now. Return whether they were new."""

    def has(self, digest: str) -> bool: ...

    def renew(self, digest: str) -> bool:
        """Set the last use to now, by the remote's clock. Return False if it is missing."""

    def remove(self, digest: str) -> None: ...

    def list_sizes(self) -> list[tuple[str, int]]:
        """Return every digest with its size in bytes."""

    def renew_lease(self, name: str) -> None: ...

    def end_lease(self, name: str) -> None: ...

    def gc(self, in_use: Collection[str], min_age_s: float, dry_run: bool) -> files.GcReport:
        """Collect garbage as `MediaStore.gc` does, with its own retries."""

    def check_writable(self) -> None: ...


def retry(call: Callable[[], Value], address: str, deadline_s: float) -> Value:
    """Return the result of `call`. Retry it after `Unavailable` for `deadline_s` seconds."""
    give_up, pause_s = float("inf"), _FIRST_PAUSE_S
    while True:
        try:
            return call()
        except Unavailable as error:
            now = time.monotonic()
            give_up = min(give_up, now + deadline_s)
            # Jitter, so that many clients do not retry at the same moment.
            wait_s = pause_s * random.Random().uniform(0.75, 1.25)
            if now + wait_s > give_up:
                raise MediaError(
                    f"the store {address} is not available after {deadline_s:g} s of retries: "
                    f"{error}",
                    "check [media] root (or --store) and the connection to the store",
                ) from error
            if now > give_up - deadline_s + WARN_AFTER_S:
                _warn(address, error, give_up)
        time.sleep(wait_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _warn(address: str, error: Unavailable, give_up: float) -> None:
    now = time.monotonic()
    if now > _warned_at.get(address, -WARN_EVERY_S) + WARN_EVERY_S:
        _warned_at[address] = now
        text = f"the store {address} does not answer ({error}). Retrying for {give_up - now:.0f} s"
        print(text, file=sys.stderr, flush=True)


def read_checked(remote: Remote, digest: str) -> bytes | None:
    """Return the remote's bytes. Read them again if they do not match their digest."""
    num_reads = 0
    while True:
        num_reads += 1
        data = retry(lambda: remote.read(digest), remote.address, remote.deadline_s)
        try:
            return data if data is None else verify_bytes(digest, data)
        except MediaCorrupt as error:
            if num_reads == _NUM_READS:
                raise MediaCorrupt(f"{error.problem}, at {remote.address}", error.fix) from None


class RemoteStore(MediaStore):
    """Images by digest at a remote, with a cache on the local disk."""

    def __init__(
        self,
        remote: Remote,
        cache: DiskCache,
        fallbacks: Iterable[str | Path | MediaStore] = (),
        limits: ImageLimits = decode.DEFAULT_LIMITS,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(os.devnull, fallbacks, limits, max_bytes)  # there is no folder
        self.root = remote.address
        self.remote, self.cache = remote, cache
        # Images whose last use this process renewed recently. Half, because answers take time.
        self._confirmed: TTLCache[str, bool] = TTLCache(_MAX_CONFIRMED, files.RENEW_AFTER_S / 2)

    def _ask(self, call: Callable[[], Value]) -> Value:
        return retry(call, self.remote.address, self.remote.deadline_s)

    def _write(self, digest: str, data: bytes) -> bool:
        if self._is_confirmed(digest):
            return False
        is_new = self._ask(lambda: self.remote.write(digest, data))
        self._confirm(digest)
        self.cache.add(digest, data)
        return is_new

    def _find(self, digest: str, renew: bool) -> bytes | None:
        if (data := self.cache.find(digest)) is not None:
            return data
        if (data := self._fetch(digest)) is not None:
            self.cache.add(digest, data)
        return data

    def _fetch(self, digest: str) -> bytes | None:
        try:
            return read_checked(self.remote, digest)
        except MediaCorrupt:
            self._forget(digest)  # the next put replaces it
            raise

    def prefetch(self, refs: Iterable[MediaRef]) -> None:
        cacheable = (ref for ref in refs if self.cache.can_keep(ref.nbytes))
        missing = {ref.digest for ref in cacheable if not self.cache.has(ref.digest)}
        has_given_up = threading.Event()

        def fetch(digest: str) -> None:
            try:
                if not has_given_up.is_set():
                    self._find(digest, renew=False)
            except MediaError as error:
                if isinstance(error.__cause__, OSError):  # the others would wait just as long
                    has_given_up.set()

        if missing:
            with ThreadPoolExecutor(min(len(missing), _NUM_PREFETCH_THREADS)) as pool:
                list(pool.map(fetch, missing))

    def _has(self, digest: str) -> bool:
        return self._ask(lambda: self.remote.has(digest))

    def touch(self, digest: str) -> bool:
        check_digest(digest)
        if self._is_confirmed(digest):
            return True
        if self._ask(lambda: self.remote.renew(digest)):
            self._confirm(digest)
            return True
        return any(store.has(digest) for store in self.fallbacks)

    def path(self, digest: str) -> Path:
        check_digest(digest)
        raise MediaError(
            f"image {digest[:12]} is at {self.root}, not in a file of this machine",
            "read its bytes with get",
        )

    def remove(self, digest: str) -> None:
        check_digest(digest)
        self._forget(digest)
        self._ask(lambda: self.remote.remove(digest))

    def iter_sizes(self) -> Iterator[tuple[str, int]]:
        yield from self._ask(self.remote.list_sizes)

    def _gc(self, in_use: Collection[str], min_age_s: float, dry_run: bool) -> files.GcReport:
        return self.remote.gc(in_use, min_age_s, dry_run)

    def renew_lease(self, name: str) -> None:
        self._ask(lambda: self.remote.renew_lease(files.check_lease_name(name)))

    def end_lease(self, name: str) -> None:
        self._ask(lambda: self.remote.end_lease(files.check_lease_name(name)))

    def check_writable(self) -> None:
        self._ask(self.remote.check_writable)

    def _is_confirmed(self, digest: str) -> bool:
        with self._refs_lock:
            return digest in self._confirmed

    def _confirm(self, digest: str) -> None:
        with self._refs_lock:
            self._confirmed[digest] = True

    def _forget(self, digest: str) -> None:
        with self._refs_lock:
            self._confirmed.pop(digest, None)
