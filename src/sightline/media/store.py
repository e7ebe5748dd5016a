"""The media store: a directory of files that are named by their digests.

    <root>/ab/cd/abcd...    the bytes of one image, unchanged
    <root>/.lock            held briefly, shared by writers and exclusively by gc

Any number of processes on any number of machines may share a root.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from cachetools import LRUCache

from sightline.errors import (
    MediaCorrupt,
    MediaError,
    MediaMissing,
    MediaRefused,
    MediaUndecodable,
    StoreFull,
)
from sightline.media import decode, files, video
from sightline.media.files import RENEW_AFTER_S
from sightline.media.header import ImageHeader, ImageLimits
from sightline.media.ref import MediaRef, check_digest, verify_bytes
from sightline.media.video import VideoHeader
from sightline.regular_file import read_bytes

if TYPE_CHECKING:
    from sightline.media.decode import Image

DEFAULT_RESERVE_BYTES = 1024**3
"""Free disk space that `check_room` reserves for a run's other files."""
_SURVEY_EVERY_S = 60.0
_SURVEY_SHARE = 0.02
"""Files are counted again after a minute, or later if counting would take over 2% of the time."""
_MAX_REFS = 65_536


class Unavailable(OSError):
    """A remote store did not answer, but may answer the same request later."""


class MediaStore:
    """Images by digest, in a folder.

    `fallback_roots` are read-only stores, searched in order for digests that `root` lacks.
    """

    root: Path | str
    """The folder, or the address of a remote store."""

    def __init__(
        self,
        root: str | Path,
        fallback_roots: Iterable[str | Path | MediaStore] = (),
        limits: ImageLimits = decode.DEFAULT_LIMITS,
        max_bytes: int | None = None,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
    ) -> None:
        # Absolute: an environment may change the working directory.
        self.root = self._folder = Path(root).absolute()
        self.fallbacks = tuple(
            store if isinstance(store, MediaStore) else MediaStore(store)
            for store in fallback_roots
        )
        self.limits = limits
        self.max_bytes = max_bytes
        self.reserve_bytes = reserve_bytes
        self._refs: LRUCache[str, MediaRef] = LRUCache(_MAX_REFS)
        self._refs_lock = threading.Lock()
        self._survey: _StoreSurvey | None = None
        self._survey_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.root)!r})"

    @property
    def places(self) -> str:
        """All roots that are searched, for error messages."""
        return " or ".join(str(store.root) for store in (self, *self.fallbacks))

    # --- writing

    def put(self, source: bytes | Path | Image) -> MediaRef:
        """Store an image or a video and return its ref.

        Bytes are stored unchanged, a path is read, and a PIL image is encoded as PNG.
        """
        ref, data = self.identify(source)
        self.put_bytes(data, ref.digest)
        return ref

    def identify(self, source: bytes | Path | Image) -> tuple[MediaRef, bytes]:
        """Return the ref of an image or a video and its bytes, without storing them."""
        data = self._bytes_of(source)
        return self._remember_ref(sha256(data).hexdigest(), self._inspect(data), len(data)), data

    def put_bytes(self, data: bytes, digest: str = "") -> str:
        """Store bytes of any kind and return their digest, which is computed unless given."""
        self.limits.check_bytes(len(data))
        digest = digest or sha256(data).hexdigest()
        if self._write(digest, data):
            with self._survey_lock:
                if self._survey:
                    self._survey.add(len(data))
        return digest

    def _write(self, digest: str, data: bytes) -> bool:
        """Store bytes durably. Return whether they were new."""
        with self._disk_errors():
            return files.write(self._folder, self.path(digest), data)

    def _bytes_of(self, source: object) -> bytes:
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if isinstance(source, Path):
            try:
                self.limits.check_bytes(source.stat().st_size)
                return read_bytes(source)
            except OSError as error:
                problem = f"cannot read {source}: {error.strerror}"
                raise MediaError(problem, "pass the path of a readable file") from error
        if decode.is_pil_image(source):
            image: Image = source  # type: ignore[assignment]
            self.limits.check_size(image.width, image.height)
            return decode.encode_png(image)
        raise MediaRefused(
            f"put does not accept a {type(source).__name__}",
            "pass bytes, a PIL image or a pathlib.Path. Resolve a url with "
            "ImageIngestor(store).resolve",
        )

    # --- reading

    def get(self, ref: MediaRef) -> bytes:
        """Return the ref's bytes, verified against its digest."""
        return self.get_bytes(ref.digest)

    def get_bytes(self, digest: str) -> bytes:
        """Return the bytes of a digest, verified against it."""
        check_digest(digest)
        damage: MediaError | None = None
        for store in (self, *self.fallbacks):
            try:
                data = store._find(digest, renew=store is self)
            except MediaError as error:
                damage = damage or error
                continue
            if data is not None:
                return data
        if damage:
            raise damage
        raise MediaMissing(
            f"image {digest[:12]} is not in the store {self.places}",
            "use the store that has the image ([media] root of a run, --media of a server), or "
            "put it again",
        )

    def image(self, ref: MediaRef) -> Image:
        """Return the image in RGB and in the ref's size, converted as `decode` describes."""
        if ref.is_video:
            raise MediaError(
                f"{ref.digest[:12]} is a video", "read its frames with media.video.VideoReaders"
            )
        try:
            image = decode.open_rgb(self.get(ref), self.limits)
        except (MediaUndecodable, MediaRefused) as error:
            raise type(error)(f"image {ref.digest[:12]}: {error.problem}", error.fix) from error
        if image.size != (ref.width, ref.height):
            raise MediaError(
                f"image {ref.digest[:12]} is {image.width}x{image.height}, "
                f"its ref says {ref.width}x{ref.height}",
                "use refs from MediaStore.put or get_ref",
            )
        return image

    def get_ref(self, digest: str) -> MediaRef:
        """Return the ref for a stored digest, read from the file's header."""
        with self._refs_lock:
            ref = self._refs.get(digest)
        if ref is not None and self.touch(digest):
            return ref
        data = self.get_bytes(digest)
        return self._remember_ref(digest, self._inspect(data), len(data))

    def _inspect(self, data: bytes) -> ImageHeader | VideoHeader:
        if (mime := video.find_video_mime(data)) is not None:
            return video.inspect_video(data, mime, self.limits)
        return decode.inspect_image(data, self.limits)

    def _remember_ref(
        self, digest: str, header: ImageHeader | VideoHeader, num_bytes: int
    ) -> MediaRef:
        frames = (header.num_frames, header.fps) if isinstance(header, VideoHeader) else ()
        ref = MediaRef(digest, header.mime, header.width, header.height, num_bytes, *frames)
        with self._refs_lock:
            self._refs[digest] = ref
        return ref

    def has(self, ref: MediaRef | str) -> bool:
        digest = ref.digest if isinstance(ref, MediaRef) else ref
        check_digest(digest)
        return self._has(digest) or any(store._has(digest) for store in self.fallbacks)

    def _has(self, digest: str) -> bool:
        return files.is_regular(files.get_image_path(self._folder, digest))

    def touch(self, digest: str) -> bool:
        """Record a use of the image. Return False if no root has it."""
        path = self.path(digest)
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return self.has(digest)
        if not stat.S_ISREG(status.st_mode):
            return self.has(digest)
        if not _is_stale(status.st_mtime):
            return True
        return files.renew_last_use(self._folder, path) or self.has(digest)

    def prefetch(self, refs: Iterable[MediaRef]) -> None:
        """Fetch these images before they are read. A folder does nothing."""

    def path(self, digest: str) -> Path:
        """Return the path of this digest in `root`, which need not exist."""
        check_digest(digest)
        return files.get_image_path(self._folder, digest)

    def digests(self) -> Iterator[str]:
        """Yield every digest in `root`."""
        return (name for name, _ in self.iter_sizes())

    def iter_sizes(self) -> Iterator[tuple[str, int]]:
        """Yield every digest in `root` with its size in bytes."""
        for path, status in files.iter_files(self._folder):
            if files.is_image_file(path):
                yield path.name, status.st_size

    def _find(self, digest: str, renew: bool) -> bytes | None:
        """Return the verified bytes in `root`, or None. `renew` records a use."""
        path = files.get_image_path(self._folder, digest)
        try:
            with files.open_image(path) as file:
                status = os.fstat(file.fileno())
                self.limits.check_bytes(status.st_size)
                data = verify_bytes(digest, file.read(status.st_size + 1))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (MediaCorrupt, MediaRefused) as error:
            raise type(error)(f"{error.problem}, in {path}", error.fix) from None
        except OSError as error:  # as the cause, it tells a server that a retry may help
            fix = "let this user read the store, and check its disk"
            raise MediaError(f"cannot read {path}: {error.strerror}", fix) from error
        if renew and _is_stale(status.st_mtime) and not files.renew_last_use(self._folder, path):
            return None  # gc removed it during the read
        return data

    def remove(self, digest: str) -> None:
        """Remove an image that nothing refers to, regardless of its age. It may be missing."""
        path = self.path(digest)
        with self._disk_errors(), suppress(FileNotFoundError):
            num_bytes = path.stat().st_size
            path.unlink()
            with self._survey_lock:
                if self._survey:
                    self._survey.add(-num_bytes, num_files=-1)

    # --- maintenance

    def verify(self) -> files.VerifyReport:
        """Read every image of `root` and report damaged ones. Nothing is removed."""
        num_files = size_bytes = 0
        corrupt: list[str] = []
        for digest, _ in self.iter_sizes():
            try:
                data = self._fetch(digest)
            except MediaError as error:
                if isinstance(error.__cause__, Unavailable):
                    raise
                corrupt.append(digest)
                data = b""
            num_files += data is not None  # None: gc removed it
            size_bytes += len(data or b"")
        return files.VerifyReport(num_files, size_bytes, corrupt)

    def _fetch(self, digest: str) -> bytes | None:
        """Return the verified bytes in `root`, or None, without recording a use."""
        return self._find(digest, renew=False)

    def gc(
        self, in_use: Collection[str], min_age_s: float = 3600.0, *, dry_run: bool = False
    ) -> files.GcReport:
        """Remove images of `root` that are not `in_use` and were unused for `min_age_s` seconds.

        No file refers to the images of a rollout in progress yet. A run's lease therefore protects
        every image that was put or used since it began.
        """
        # A set of refs or urls would match no digest, and everything would be removed.
        for digest in in_use:
            check_digest(digest)
        report = self._gc(in_use, min_age_s, dry_run)
        with self._survey_lock:
            self._survey = None
        return report

    def _gc(self, in_use: Collection[str], min_age_s: float, dry_run: bool) -> files.GcReport:
        with self._disk_errors():
            return files.gc(self._folder, in_use, min_age_s, dry_run=dry_run)

    def renew_lease(self, name: str) -> None:
        """Protect images put or used since the first call with this name, until `end_lease` or
        half an hour without a renewal."""
        with self._disk_errors():
            files.renew_lease(self._folder, name)

    def end_lease(self, name: str) -> None:
        with self._disk_errors():
            files.end_lease(self._folder, name)

    def size_bytes(self) -> int:
        """Return the bytes of all images in `root`. It is cheap enough for every step.

        Files are counted about once a minute. In between, only this process's puts are added.
        """
        return self._get_survey().size_bytes

    def count(self) -> int:
        """Return the number of images in `root`, from the same count as `size_bytes`."""
        return self._get_survey().num_files

    def check_room(self, num_bytes: int = 0, also: Iterable[MediaStore] = ()) -> None:
        """Raise `StoreFull` if `num_bytes` more would exceed `max_bytes`, including the stores
        in `also`, or would leave the disk with less than the reserve."""
        if self.max_bytes is not None:
            size = sum(store.size_bytes() for store in (self, *also))
            if size + num_bytes > self.max_bytes:
                raise StoreFull(
                    f"the store {self.root} holds {size} bytes, its limit is {self.max_bytes}",
                    "free space with `sightline media gc`, or raise the limit ([media] max_gb of "
                    "a run, --max-media-gb of a server, --max-gb of a media service)",
                )
        if isinstance(self.root, str):
            return  # a remote store checks its own disk
        free = files.measure_free_space(self.root)
        if free.num_bytes < self.reserve_bytes + num_bytes:
            raise StoreFull(
                f"the disk of {self.root} has {free}, and {self.reserve_bytes} bytes stay in "
                "reserve",
                "free space, for instance with `sightline media gc`, or use another disk for a "
                "new run ([media] root) or server (--media)",
            )

    def check_writable(self) -> None:
        """Raise `MediaError` unless images can be put here. Create the root if it is missing."""
        with self._disk_errors():
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            with files.lock_store(self._folder), tempfile.TemporaryFile(dir=self._folder):
                pass

    def _get_survey(self) -> _StoreSurvey:
        survey = self._survey
        if survey is None or survey.is_old():
            # Outside the lock: counting may take long, and put must not wait.
            survey = _StoreSurvey(self.iter_sizes())
            with self._survey_lock:
                self._survey = survey
        return survey

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(
                    f"no space left for the store {self.root}: {error.strerror}",
                    "free space on its disk, for instance with `sightline media gc`",
                ) from error
            raise MediaError(
                f"cannot write to the store {self.root}: {error}",
                "set [media] root to a directory that this user can write to",
            ) from error


def _is_stale(last_use: float) -> bool:
    # In both directions: a network disk's clock may be ahead.
    return abs(time.time() - last_use) > RENEW_AFTER_S


class _StoreSurvey:
    """The number and size of a root's images at one moment, plus later additions."""

    def __init__(self, sizes: Iterator[tuple[str, int]]) -> None:
        began = time.monotonic()
        self.num_files = self.size_bytes = 0
        for _, num_bytes in sizes:
            self.add(num_bytes)
        self._taken_at = time.monotonic()
        self._took_s = self._taken_at - began

    def add(self, num_bytes: int, num_files: int = 1) -> None:
        self.num_files += num_files
        self.size_bytes += num_bytes

    def is_old(self) -> bool:
        age_s = time.monotonic() - self._taken_at
        return age_s > max(_SURVEY_EVERY_S, self._took_s / _SURVEY_SHARE)
