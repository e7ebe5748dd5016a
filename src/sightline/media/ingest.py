"""Turn the url in a message into a ref in the store.

    data:image/...;base64,...    always, as is data:video/...
    media:sha256:<hex>           always; the store must have it
    file:///absolute/path        below an allowed root; none by default
    http(s)://host/path          from an allowed host; none by default

The declared type of a url is not trusted. The bytes determine the type.
"""

from __future__ import annotations

import binascii
import errno
import math
import os
import threading
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cachetools import LRUCache

from sightline.errors import ConfigError, MediaError, MediaMissing, MediaRefused, MessageError
from sightline.media.decode import DEFAULT_LIMITS
from sightline.media.fetch import HostResolver, fetch, resolve_host
from sightline.media.header import ImageLimits
from sightline.media.ref import URL_PREFIX, MediaRef, is_digest
from sightline.media.store import MediaStore
from sightline.media.video import find_video_mime
from sightline.regular_file import open_file

_MAX_SEEN_URLS = 8_192


class UrlRefCache:
    """Remembers the ref of each url, and resolves a url once.

    A url keeps its first image, so that sending a history again does not change it. Above
    `max_urls`, the least recently used are forgotten. Thread-safe.
    """

    def __init__(
        self,
        resolve: Callable[[str, str, bool], MediaRef],
        store: MediaStore,
        max_urls: float = math.inf,
    ) -> None:
        self._resolve = resolve
        self._store = store
        self._refs: LRUCache[bytes, MediaRef] = LRUCache(max_urls)
        self._lock = threading.Lock()

    def resolve(self, url: str, path: str, takes_video: bool = True) -> MediaRef:
        """Return the ref of the image at `url`. Errors name `path` and are not cached."""
        key = sha256(url.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._refs.get(key)
        # An image that gc removed is resolved again.
        if known is not None and self._store.touch(known.digest):
            return known
        ref = self._resolve(url, path, takes_video)
        with self._lock:
            # If two requests send the same new url, the first one wins.
            if self._refs.get(key) is known:
                self._refs[key] = ref
            return self._refs[key]

    def __len__(self) -> int:
        return len(self._refs)


class ImageIngestor:
    """Stores images from the sources that the run allows. Its methods block while they read."""

    def __init__(
        self,
        store: MediaStore,
        file_roots: Iterable[str | Path] = (),
        http_hosts: Iterable[str] = (),
        timeout_s: float = 10.0,
        resolve: HostResolver = resolve_host,
        takes_addresses: bool = True,
    ) -> None:
        """`timeout_s` limits one download, and `resolve` looks hosts up. Without `takes_addresses`,
        file:// and http(s):// urls cannot be allowed, and errors do not mention them."""
        self.store = store
        self.http_hosts = frozenset(host.lower() for host in http_hosts)
        self.timeout_s = timeout_s
        self._resolve = resolve
        self.file_roots = tuple(_resolve_root(Path(root)) for root in file_roots)
        # A repeated data url is hashed, but neither decoded nor written.
        data_urls = UrlRefCache(self._put_data, store, _MAX_SEEN_URLS)
        self._sources: dict[str, Callable[[str, bool], MediaRef]] = {
            "data": lambda url, takes_video: data_urls.resolve(url, "", takes_video),
            "media": self._from_media,
        }
        self._fix = _FIX_SHAPE if takes_addresses else _FIX_SENT
        if takes_addresses:
            self._sources |= {"file": self._from_file}
            self._sources |= dict.fromkeys(("http", "https"), self._from_http)

    def resolve(self, url: str, path: str, takes_video: bool = True) -> MediaRef:
        """Return the ref of the image at `url`, or also of a video if `takes_video`. Errors name
        `path`, the url's JSON path."""
        try:
            source = self._sources.get(str(url).partition(":")[0].lower())
            if source is None:
                raise MessageError(f"{str(url)[:60]!r} is not a url of an image", self._fix)
            return source(url, takes_video)
        except (MediaError, MessageError) as error:
            # Keep the first cause: an OSError tells a server that a retry may help.
            raise type(error)(f"{path}: {error.problem}", error.fix) from (error.__cause__ or error)

    def _put_data(self, url: str, _path: str, takes_video: bool) -> MediaRef:
        return self._put(read_data_url(url, self.store.limits), takes_video)

    def _put(self, data: bytes, takes_video: bool) -> MediaRef:
        """Store an external client's image if there is room."""
        if not takes_video and find_video_mime(data):
            raise MessageError("expected an image, got a video", "send it as a part of video_url")
        self.store.check_room(len(data))
        return self.store.put(data)

    def _from_media(self, url: str, takes_video: bool) -> MediaRef:
        digest = url.removeprefix(URL_PREFIX)
        if not is_digest(digest):
            fix = f"write it as {URL_PREFIX}<64 lowercase hex characters>, which is MediaRef.url"
            raise MessageError(f"{url[:80]!r} is not a media url", fix)
        ref = self.store.get_ref(digest)
        if not self.store.touch(digest):  # only this machine's cache has it
            raise MediaMissing(
                f"image {digest[:12]} is no longer in the store {self.store.places}", "put it again"
            )
        return ref

    def _from_file(self, url: str, takes_video: bool) -> MediaRef:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise MessageError(f"{url[:80]!r} is not a url ({error})", _FIX_SHAPE) from error
        name = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not name.startswith("/") or "\0" in name:
            raise MessageError(
                f"the file url has no absolute path: {url[:80]!r}",
                "write it as file:///absolute/path",
            )
        try:
            # Resolve links and `..` first, so that the path that is checked is the one read.
            path = Path(name).resolve()
        except (OSError, RuntimeError) as error:
            raise MediaRefused(f"cannot follow {name}: {error}", _FIX_FILE) from error
        root = next((root for root in self.file_roots if path.is_relative_to(root)), None)
        if root is None:
            raise MediaRefused(f"{name} is not below an allowed file root", _FIX_FILE)
        return self._put(self._read(path), takes_video)

    def _from_http(self, url: str, takes_video: bool) -> MediaRef:
        max_bytes = self.store.limits.max_bytes
        data = fetch(url, self.http_hosts, max_bytes, self.timeout_s, self._resolve)
        return self._put(data, takes_video)

    def _read(self, path: Path) -> bytes:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                opened = f"/proc/self/fd/{place}"
                if os.readlink(opened) != str(path):  # through a link added since the check
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                with open_file(opened) as file:
                    self.store.limits.check_bytes(os.fstat(file.fileno()).st_size)
                    return file.read(self.store.limits.max_bytes + 1)
            finally:
                os.close(place)
        except OSError as error:
            raise MediaRefused(f"cannot read {path}: {error.strerror}", _FIX_FILE) from error


def read_data_url(url: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """Return the bytes of an image or a video in a data url."""
    head, comma, text = url.partition(",")
    kind, *parameters = head[len("data:") :].lower().split(";")
    if not comma or not kind.startswith(("image/", "video/")) or "base64" not in parameters:
        raise MessageError(f"a data url that begins {head[:60]!r}", _FIX_DATA)
    text = "".join(unquote(text).split())
    limits.check_bytes(len(text) // 4 * 3 - text[-2:].count("="))
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise MediaRefused(f"a data url whose base64 is bad: {error}", _FIX_DATA) from error


def _resolve_root(root: Path) -> Path:
    if not root.is_absolute():
        raise ConfigError(
            f"[media] file_roots contains the relative path {root}", "write an absolute path"
        )
    return root.resolve()


_FIX_SENT = "send a data:image/...;base64, url, or the media:sha256: url of a stored image"
_FIX_SHAPE = f"{_FIX_SENT}; file:// and http(s):// urls need [media] file_roots or http_hosts"
_FIX_DATA = "write it as data:image/png;base64,<the bytes in base64>"
_FIX_FILE = "send the image as a data: url, or add its directory to [media] file_roots"
