"""A remote in an object store (S3, GCS, Azure), accessed through obstore.

    PREFIX/ab/cd/abcd...     one object per image, named like the files of a folder
    PREFIX/.leases/RUN       the start time of a run, rewritten at every renewal
    PREFIX/.gc               exists while gc removes a batch of images

All times are from the store's clock. An object store has no locks for gc and writers. A writer that
finds its image in the store therefore writes it again. It waits for a removal in progress, and
checks that the image exists. gc announces itself. It checks the age of each image again before it
removes the image. An old announcement belongs to a killed gc.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sightline.errors import MediaError
from sightline.media import files
from sightline.media.ref import is_digest
from sightline.media.remote import Unavailable, read_checked, retry

GC_NAME, CLOCK_NAME = ".gc", ".clock"
_GC_BATCH = 1000
_GC_BATCH_S = 60.0
"""Time limit of an announced removal."""
_YOUNG_S = files.RENEW_AFTER_S / 2
"""More recent uses are not renewed. Half the interval, because the caller caches the answer."""
_CLOCK_S = 60.0
"""Maximum time for which the store's clock is extrapolated from its last reading."""
_NUM_THREADS = 16
_POLL_S = 0.2
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")

Value = TypeVar("Value")


class ObjectRemote:
    """An object store as a remote. obstore reads credentials and endpoints from the environment."""

    def __init__(self, address: str, timeout_s: float, deadline_s: float) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError as error:
            raise MediaError(
                f"the store {address} requires obstore, which is not installed",
                "run `pip install 'sightline-rl[object-store]'`",
            ) from error
        self.address, self._timeout_s, self.deadline_s = address, timeout_s, deadline_s
        self._obstore, self._errors = obstore, exceptions
        self._clock = (-math.inf, 0.0)
        # HTTP is allowed: an endpoint without TLS is always explicit. `retry` handles retries.
        seconds = {"timeout": f"{timeout_s}s", "connect_timeout": f"{min(10, timeout_s)}s"}
        options: Any = {
            "client_options": {**seconds, "allow_http": True},
            "retry_config": {"max_retries": 0},
        }
        try:
            self._store: Any = from_url(address, **options)
        except Exception as error:  # from obstore or its parsers
            raise MediaError(
                f"cannot open the store {address}: {_get_first_line(error)}",
                "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, and set "
                "the environment variables of its credentials",
            ) from error

    # --- images

    def read(self, digest: str) -> bytes | None:
        return self._get(_get_key(digest))

    def write(self, digest: str, data: bytes) -> bool:
        try:
            self._call(
                lambda: self._obstore.put(self._store, _get_key(digest), data, mode="create")
            )
        except self._errors.AlreadyExistsError:
            self._write_again(digest, data)
            return False
        return True

    def has(self, digest: str) -> bool:
        return self._head(_get_key(digest)) is not None

    def renew(self, digest: str) -> bool:
        used_at = self._get_time(_get_key(digest))
        if used_at and self._estimate_now() - used_at < _YOUNG_S:
            return True
        # Verify the bytes, because a damaged read would replace an intact image.
        if not used_at or (data := read_checked(self, digest)) is None:
            return False
        self._write_again(digest, data)
        return True

    def remove(self, digest: str) -> None:
        self._call(lambda: self._obstore.delete(self._store, _get_key(digest)))

    def list_sizes(self) -> list[tuple[str, int]]:
        return [(digest, size) for digest, size, _ in self._list_images()]

    def upload(self, key: str, file: Path) -> None:
        """Write a file that is not an image, such as a table of samples, under `key`."""
        self._retry(lambda: self._put(key, file))

    def check_writable(self) -> None:
        self._read_clock()

    def _write_again(self, digest: str, data: bytes) -> None:
        while True:
            # Retry each request separately: on a bad network, all together might never succeed.
            self._retry(lambda: self._put(_get_key(digest), data))
            began, gc = time.monotonic(), self._retry(lambda: self._head(GC_NAME))
            if gc is not None:
                now = self._retry(lambda: self._get_time(_get_key(digest)))
                is_over = now - gc["last_modified"].timestamp() > 2 * _GC_BATCH_S
                while not is_over and self._has_gc(gc["e_tag"]):
                    is_over = time.monotonic() - began > _GC_BATCH_S
                    time.sleep(_POLL_S)
            # A removal that starts later sees the recent use.
            if self._retry(lambda: self.has(digest)):
                return

    # --- leases and garbage

    def renew_lease(self, name: str) -> None:
        key = f"{files.LEASES_NAME}/{name}"
        if (began := self._get(key)) is None:
            self._put(key, b"")
        if not began:
            began = str(self._get_time(key)).encode()
        self._put(key, began)

    def end_lease(self, name: str) -> None:
        self._call(lambda: self._obstore.delete(self._store, f"{files.LEASES_NAME}/{name}"))

    def gc(self, in_use: Collection[str], min_age_s: float, dry_run: bool) -> files.GcReport:
        images = self._retry(self._list_images)
        newest = self._find_newest(min_age_s)
        unused = [image for image in images if image[0] not in in_use]
        old = [(digest, size) for digest, size, used_at in unused if used_at <= newest]
        removed: list[tuple[str, int]] = []
        for start in range(0, len(old), _GC_BATCH):
            batch = old[start : start + _GC_BATCH]
            removed += batch if dry_run else self._remove(batch, min_age_s)
        return files.GcReport(
            removed=[digest for digest, _ in removed],
            removed_bytes=sum(size for _, size in removed),
            num_in_use=len(images) - len(unused),
            num_young=len(unused) - len(removed),
            num_temporary=0,
        )

    def _remove(self, batch: list[tuple[str, int]], min_age_s: float) -> list[tuple[str, int]]:
        """Remove the images of `batch` that are still old, and return them."""
        with self._announced_gc() as is_in_time, ThreadPoolExecutor(_NUM_THREADS) as pool:
            newest = self._find_newest(min_age_s)
            keys = [_get_key(digest) for digest, _ in batch]
            times = pool.map(lambda key: self._retry(lambda: self._get_time(key)), keys)
            old = [entry for entry, time in zip(batch, times, strict=True) if 0 < time <= newest]
            if old and is_in_time():
                old_keys = [_get_key(digest) for digest, _ in old]
                self._once(lambda: self._obstore.delete(self._store, old_keys))
                return old
        return []

    @contextmanager
    def _announced_gc(self) -> Iterator[Callable[[], bool]]:
        """Announce a removal, which blocks other gcs. Yield a function that checks its time."""
        began, token = time.monotonic(), secrets.token_hex(16).encode()
        put = self._obstore.put
        try:
            mode = self._choose_gc_mode()
            e_tag = self._once(lambda: put(self._store, GC_NAME, token, mode=mode))["e_tag"]
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            raise MediaError(
                f"another gc of {self.address} is running",
                f"wait until it ends, or {2 * _GC_BATCH_S:g} s if it was killed",
            ) from None
        try:
            # The removal takes at most one request's timeout.
            yield lambda: time.monotonic() - began < _GC_BATCH_S - self._timeout_s
        finally:
            if self._has_gc(e_tag):
                self._retry(lambda: self._call(lambda: self._obstore.delete(self._store, GC_NAME)))

    def _choose_gc_mode(self) -> Any:
        """Return obstore's mode that creates an announcement, or replaces a killed gc's."""
        head = self._retry(lambda: self._head(GC_NAME))
        if head is not None:
            age_s = self._retry(self._read_clock) - head["last_modified"].timestamp()
            if age_s > 2 * _GC_BATCH_S:
                return {name: head[name] for name in ("e_tag", "version") if head[name]}
        return "create"

    def _has_gc(self, e_tag: str | None) -> bool:
        """Return whether the current announcement has this tag."""
        head = self._retry(lambda: self._head(GC_NAME))
        return head is not None and head["e_tag"] == e_tag

    def _find_newest(self, min_age_s: float) -> float:
        """Return the latest time of last use for which an unused image may be removed."""
        now = self._retry(self._read_clock)
        remotes = [self]
        if urlsplit(self.address).path.endswith(f"/{files.BLOBS}"):
            images = self.address.removesuffix(f"/{files.BLOBS}")
            remotes += [ObjectRemote(images, self._timeout_s, self.deadline_s)]
        leases = [lease for remote in remotes for lease in remote._retry(remote._list_leases)]
        return min(now - min_age_s, files.find_lease_start(leases, now))

    def _list_leases(self) -> list[tuple[float, float]]:
        leases = self._list(files.LEASES_NAME + "/")
        return [(float(self._get(key) or renewed), renewed) for key, _, renewed in leases]

    def _read_clock(self) -> float:
        self._put(CLOCK_NAME, b"")
        return self._get_time(CLOCK_NAME)

    def _estimate_now(self) -> float:
        """Return the store's time, extrapolated with our clock."""
        read_at, then = self._clock
        if time.monotonic() - read_at > _CLOCK_S:
            read_at, then = self._clock = time.monotonic(), self._read_clock()
        return then + time.monotonic() - read_at

    # --- objects

    def _list_images(self) -> list[tuple[str, int, float]]:
        """Return digest, size and last use of every image."""
        return self._list(None, _find_digest)

    def _list(
        self, prefix: str | None, select: Callable[[str], str] = str
    ) -> list[tuple[str, int, float]]:
        """Return name, size and time of every object for which `select` returns a name."""
        return self._call(
            lambda: [
                (name, meta["size"], meta["last_modified"].timestamp())
                for page in self._obstore.list(self._store, prefix)
                for meta in page
                if (name := select(meta["path"]))
            ]
        )

    def _get_time(self, key: str) -> float:
        head = self._head(key)
        return 0.0 if head is None else head["last_modified"].timestamp()

    def _head(self, key: str) -> Any | None:
        try:
            return self._call(lambda: self._obstore.head(self._store, key))
        except FileNotFoundError:
            return None

    def _get(self, key: str) -> bytes | None:
        try:
            return self._call(lambda: bytes(self._obstore.get(self._store, key).bytes()))
        except FileNotFoundError:
            return None

    def _put(self, key: str, data: bytes | Path) -> None:
        self._call(lambda: self._obstore.put(self._store, key, data))

    def _once(self, call: Callable[[], Value]) -> Value:
        return retry(lambda: self._call(call), self.address, deadline_s=0)

    def _retry(self, call: Callable[[], Value]) -> Value:
        return retry(call, self.address, self.deadline_s)

    def _call(self, call: Callable[[], Value]) -> Value:
        errors = self._errors
        refusals = (
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
            errors.NotSupportedError,
            errors.InvalidPathError,
            errors.UnknownConfigurationKeyError,
        )
        try:
            return call()
        except (errors.BaseError, FileNotFoundError) as error:
            if any(code in str(error) for code in _NO_BUCKET):
                raise MediaError(
                    f"no such bucket: {self.address}",
                    "check the name in [media] root, --store or [logging] upload_samples_to, or "
                    "create the bucket",
                ) from error
            if isinstance(error, refusals):
                raise MediaError(
                    f"the store {self.address} refused: {_get_first_line(error)}",
                    "check its name, and the credentials in this process's environment",
                ) from error
            answers = (FileNotFoundError, errors.AlreadyExistsError, errors.PreconditionError)
            if isinstance(error, answers):
                raise
            raise Unavailable(_get_first_line(error)) from error


def _get_key(digest: str) -> str:
    return f"{digest[:2]}/{digest[2:4]}/{digest}"


def _find_digest(key: str) -> str:
    """Return the digest of the image at `key`. Empty for other objects."""
    digest = key.rpartition("/")[2]
    return digest if is_digest(digest) and key == _get_key(digest) else ""


def _get_first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
