"""From the url in a message to a ref in the store.

    data:image/...;base64,...    always: the bytes are put; likewise data:video/...
    media:sha256:<hex>           always: the store must have it
    file:///absolute/path        under an allowed root; none by default
    http(s)://host/path          from an allowed host; none by default

What the bytes are is found by looking at them; the type that a url declares is not trusted.
"""

from __future__ import annotations

import binascii
import math
import os
import stat
import threading
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cachetools import LRUCache

from sightline.errors import (
    ConfigError,
    MediaError,
    MediaMissing,
    MediaRefused,
    MessageError,
)
from sightline.media.fetch import HostResolver, fetch, resolve_host
from sightline.media.ref import MediaRef, digest_of_url
from sightline.media.store import MediaStore

_MAX_SEEN_URLS = 8_192


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


class ImageIngestor:
    """Takes images from the sources that the run allows. Blocks while it reads or fetches."""

    def __init__(
        self,
        store: MediaStore,
        file_roots: Iterable[str | Path] = (),
        http_hosts: Iterable[str] = (),
        timeout_s: float = 10.0,
        resolve: HostResolver = resolve_host,
        takes_addresses: bool = True,
    ) -> None:
        """`timeout_s` is for one fetch, and `resolve` looks hosts up. Without `takes_addresses`
        nobody can allow file:// and http(s):// urls, and errors do not tell how."""
        self.store = store
        self.http_hosts = frozenset(host.lower() for host in http_hosts)
        self.timeout_s = timeout_s
        self._resolve = resolve
        self.file_roots = tuple(_resolve_root(Path(root)) for root in file_roots)
        # Conversations that begin with the same images share their data urls: one that was seen
        # before costs its hash, no decoding and no write.
        data_urls = UrlRefCache(self._put_data, store, _MAX_SEEN_URLS)
        self._sources: dict[str, Callable[[str], MediaRef]] = {
            "data": lambda url: data_urls.resolve(url, ""),
            "media": self._from_media,
            "file": self._from_file,
            "http": self._from_http,
            "https": self._from_http,
        }
        self._fix = _FIX_SHAPE if takes_addresses else _FIX_SENT
        if not takes_addresses:
            self._sources |= dict.fromkeys(("file", "http", "https"), self._refuse)

    def resolve(self, url: str, path: str) -> MediaRef:
        """The ref of the image at `url`. Every error names `path`, the url's JSON path."""
        try:
            if not isinstance(url, str) or not url:
                what = "an empty url" if url == "" else f"a {type(url).__name__} in place of a url"
                raise MessageError(what, self._fix)
            source = self._sources.get(url.partition(":")[0].lower())
            if source is None:
                raise MessageError(f"no image comes from {url[:60]!r}", self._fix)
            return source(url)
        except (MediaError, MessageError) as error:
            # The first cause stays the cause: by an OSError a server knows that it may heal.
            cause = error.__cause__ or error
            raise type(error)(f"{path}: {error.problem}", error.fix) from cause

    def _put_data(self, url: str, _path: str) -> MediaRef:
        head, comma, text = url.partition(",")
        kind, *parameters = head[len("data:") :].lower().split(";")
        if not comma or not kind.startswith(("image/", "video/")) or "base64" not in parameters:
            raise MessageError(f"a data url that begins {head[:60]!r}", _FIX_DATA)
        text = "".join(unquote(text).split())
        self.store.limits.check_bytes(len(text) // 4 * 3 - text[-2:].count("="))
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except ValueError as error:
            raise MediaRefused(f"a data url whose base64 is bad: {error}", _FIX_DATA) from error
        return self._put(data)

    def _put(self, data: bytes) -> MediaRef:
        """What others send is taken while there is room for it, and for what a run writes."""
        self.store.check_room(len(data))
        return self.store.put(data)

    def _from_media(self, url: str) -> MediaRef:
        try:
            digest = digest_of_url(url)
        except MediaError as error:
            raise MessageError(error.problem, error.fix) from error
        ref = self.store.get_ref(digest)
        if not self.store.touch(digest):  # this machine has kept it, and no other could have it
            raise MediaMissing(
                f"image {digest[:12]} is no more in the store {self.store.places}", "put it again"
            )
        return ref

    def _from_file(self, url: str) -> MediaRef:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise MessageError(f"not a url: {url[:80]!r} ({error})", _FIX_SHAPE) from error
        name = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not name.startswith("/") or "\0" in name:
            raise MessageError(
                f"a file url without an absolute path: {url[:80]!r}",
                "write it as file:///absolute/path",
            )
        try:
            # Links and `..` are followed first, so that the place that is read is the one checked.
            path = Path(name).resolve()
        except (OSError, RuntimeError) as error:
            raise MediaRefused(f"cannot follow {name}: {error}", _FIX_FILE) from error
        root = next((root for root in self.file_roots if path.is_relative_to(root)), None)
        if root is None:
            raise MediaRefused(f"{name} is under no allowed file root", _FIX_FILE)
        return self._put(self._read(root, path))

    def _refuse(self, url: str) -> MediaRef:
        raise MediaRefused(f"no image is fetched here: {url[:60]!r}", self._fix)

    def _from_http(self, url: str) -> MediaRef:
        data = fetch(
            url, self.http_hosts, self.store.limits.max_bytes, self.timeout_s, self._resolve
        )
        return self._put(data)

    def _read(self, root: Path, path: Path) -> bytes:
        try:
            fd = _open_below(root, path)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise MediaRefused(f"{path} is no regular file", _FIX_FILE)
                self.store.limits.check_bytes(status.st_size)
                with open(fd, "rb", closefd=False) as file:
                    return file.read(self.store.limits.max_bytes + 1)
            finally:
                os.close(fd)
        except OSError as error:
            raise MediaRefused(f"cannot read {path}: {error.strerror}", _FIX_FILE) from error


def _open_below(root: Path, path: Path) -> int:
    """A descriptor of the file at `path`, whose way from `root` holds no link.

    It is walked folder by folder: a link that was put there since it was looked at is refused,
    wherever on the way it stands.
    """
    if path == root:
        return os.open(path, _FILE)
    *folders, name = path.relative_to(root).parts
    folder = os.open(root, _FOLDER)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(name, _FILE, dir_fd=folder)
    finally:
        os.close(folder)


# A folder that may be passed through need not be one that may be listed.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW
# Opening a pipe must not wait for its writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def _resolve_root(root: Path) -> Path:
    if not root.is_absolute():
        raise ConfigError(
            f"[media] file_roots has the relative path {root}", "write it as an absolute path"
        )
    return root.resolve()


_FIX_SENT = (
    "give the image as a data:image/...;base64, url or as the media:sha256: url of a stored image"
)
_FIX_SHAPE = f"{_FIX_SENT}; file:// and http(s):// urls need [media] file_roots or http_hosts"
_FIX_DATA = "write it as data:image/png;base64,<the image's bytes in base64>"
_FIX_FILE = "send the image as a data: url, or add its directory to [media] file_roots"
