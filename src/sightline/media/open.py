"""Open the store at a root: a folder or an address."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from sightline.errors import MediaError
from sightline.media import decode
from sightline.media.cache import DiskCache
from sightline.media.header import ImageLimits
from sightline.media.remote import (
    DEADLINE_S,
    DEFAULT_CACHE_BYTES,
    DEFAULT_CACHE_DIR,
    TIMEOUT_S,
    Remote,
    RemoteStore,
)
from sightline.media.store import MediaStore

OBJECT_STORES = ("s3", "gs", "az")


def is_address(root: str | Path) -> bool:
    """Return whether a root is an address, not a folder of this machine."""
    return "://" in str(root)


def open_store(
    root: str | Path,
    fallback_roots: Iterable[str | Path] = (),
    *,
    limits: ImageLimits = decode.DEFAULT_LIMITS,
    max_bytes: int | None = None,
    token: str = "",
    cache_dir: str | Path = "",
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    timeout_s: float = TIMEOUT_S,
    deadline_s: float = DEADLINE_S,
) -> MediaStore:
    """Open the store at `root`, which also reads from `fallback_roots`.

    `token` is for media services. Remote stores cache images at `cache_dir`.
    """
    cache = DiskCache(Path(cache_dir or DEFAULT_CACHE_DIR), cache_bytes)

    def open_single(place: str | Path, fallbacks: list[MediaStore]) -> MediaStore:
        if not is_address(place):
            return MediaStore(place, fallbacks, limits, max_bytes)
        remote = _open_remote(str(place).rstrip("/"), token, limits, timeout_s, deadline_s)
        return RemoteStore(remote, cache, fallbacks, limits, max_bytes)

    return open_single(root, [open_single(place, []) for place in fallback_roots])


def _open_remote(
    address: str, token: str, limits: ImageLimits, timeout_s: float, deadline_s: float
) -> Remote:
    parts = urlsplit(address)
    if parts.scheme in ("http", "https"):
        from sightline.media.http_remote import HttpRemote

        return HttpRemote(address, token, limits.max_bytes, timeout_s, deadline_s)
    if parts.scheme in OBJECT_STORES:
        from sightline.media.object_remote import ObjectRemote

        return ObjectRemote(address, timeout_s, deadline_s)
    raise MediaError(
        f"{address} is not a store: {parts.scheme}:// is unknown",
        "write a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
        "https://HOST:PORT",
    )
