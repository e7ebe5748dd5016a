"""Where images and videos are kept: a directory of files named by their digests.

    <root>/ab/cd/abcd...    one file an image, its bytes as they came
    <root>/.lock            held for a moment by writers, and alone by gc

Any number of processes on any number of machines may share a root.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
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

if TYPE_CHECKING:
    from sightline.media.decode import Image

# Free space that `check_room` keeps for everything else that a run writes beside its images.
DEFAULT_RESERVE_BYTES = 1024**3

# A new count of all files starts this long after the last, or, in a large store, when the last
# one's own duration makes up 2% of the time.
_SURVEY_EVERY_S = 60.0
_SURVEY_SHARE = 0.02

_MAX_REFS = 65_536


class MediaStore:
    """Images by digest, in a folder.

    `put` and the reads look after `root`. `fallback_roots` are other stores, or their folders, that
    are only read: a digest that `root` lacks is looked for there, in order.
    """

    root: Path | str
    """The folder, or the address of a store that is elsewhere."""

    def __init__(
        self,
        root: str | Path,
        fallback_roots: Iterable[str | Path | MediaStore] = (),
        limits: ImageLimits = decode.DEFAULT_LIMITS,
        max_bytes: int | None = None,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
    ) -> None:
        # Absolute: an environment may change the folder of its process.
        self.root = self._folder = Path(root).absolute()
        self.fallbacks = tuple(
            one if isinstance(one, MediaStore) else MediaStore(one) for one in fallback_roots
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

    def __reduce__(self) -> tuple[Callable[..., MediaStore], tuple[object, ...]]:
        # Worker processes get a store of their own on the same files.
        settings = (self.fallbacks, self.limits, self.max_bytes, self.reserve_bytes)
        return MediaStore, (self.root, *settings)

    @property
    def places(self) -> str:
        """Every root that is searched, in words."""
        return " or ".join(str(store.root) for store in (self, *self.fallbacks))

    # --- in

    def put(self, source: bytes | Path | Image) -> MediaRef:
        """The ref of these bytes, which the store holds from now on.

        Bytes are kept as they are, those of an image or of a video. A path is read, a PIL image is
        encoded as PNG.
        """
        ref, data = self.identify(source)
        self.put_bytes(data, ref.digest)
        return ref

    def identify(self, source: bytes | Path | Image) -> tuple[MediaRef, bytes]:
        """Return the ref of an image or a video and its bytes, without storing them."""
        data = self._bytes_of(source)
        header = self._inspect(data)
        return self._remember_ref(sha256(data).hexdigest(), header, len(data)), data

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
        """Have these bytes in the store, durably; True when they were not there before."""
        with self._disk_errors():
            return files.write(self._folder, self.path(digest), data)

    def _bytes_of(self, source: object) -> bytes:
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if isinstance(source, Path):
            try:
                self.limits.check_bytes(source.stat().st_size)
                return source.read_bytes()
            except OSError as error:
                raise MediaError(
                    f"cannot read {source}: {error.strerror}",
                    "put the path of a readable file",
                ) from error
        if isinstance(source, str):
            raise MediaRefused(
                f"put was given the text {source[:60]!r}",
                "give a path as pathlib.Path; a url goes through ImageIngestor(store).resolve, "
                "which knows which sources are allowed",
            )
        if decode.is_pil_image(source):
            image: Image = source  # type: ignore[assignment]
            self.limits.check_size(image.width, image.height)
            return decode.encode_png(image)
        raise MediaRefused(
            f"put was given a {type(source).__name__}",
            "give bytes, a PIL image or a pathlib.Path",
        )

    # --- out

    def get(self, ref: MediaRef) -> bytes:
        """The bytes that `ref` names, checked against its digest."""
        return self._read(ref.digest)

    def get_bytes(self, digest: str) -> bytes:
        """The bytes of a digest, checked against it."""
        return self._read(digest)

    def image(self, ref: MediaRef) -> Image:
        """The picture in RGB, of the ref's size, by the rule in `decode`."""
        if ref.is_video:
            raise MediaError(
                f"{ref.digest[:12]} is a video", "read its frames with media.video.VideoReaders"
            )
        try:
            image = decode.open_rgb(self.get(ref), self.limits)
        except (MediaUndecodable, MediaRefused) as error:
            problem = f"image {ref.digest[:12]}: {error.problem}"
            raise type(error)(problem, error.fix) from error
        if image.size != (ref.width, ref.height):
            raise MediaError(
                f"image {ref.digest[:12]} is {image.width}x{image.height}, "
                f"its ref says {ref.width}x{ref.height}",
                "take refs from MediaStore.put or get_ref",
            )
        return image

    def get_ref(self, digest: str) -> MediaRef:
        """The ref of a stored digest, from its header; `MediaMissing` when there is none."""
        with self._refs_lock:
            ref = self._refs.get(digest)
        if ref is not None and self.touch(digest):
            return ref
        data = self._read(digest)
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
        """Count this as a use of the image; False when no root holds it."""
        path = self.path(digest)
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return self.has(digest)
        if not stat.S_ISREG(found.st_mode):
            return self.has(digest)
        if not _is_stale(found.st_mtime):
            return True
        return files.renew_last_use(self._folder, path) or self.has(digest)

    def prefetch(self, refs: Iterable[MediaRef]) -> None:
        """Have these images at hand for the reads that follow; what cannot be had now is left to
        those reads. A folder has nothing to do."""

    def path(self, digest: str) -> Path:
        """Where `root` keeps this digest, whether it is there or not."""
        check_digest(digest)
        return files.get_image_path(self._folder, digest)

    def digests(self) -> Iterator[str]:
        """Every digest in `root`."""
        return (name for name, _ in self.iter_sizes())

    def iter_sizes(self) -> Iterator[tuple[str, int]]:
        """Every digest in `root`, and its bytes."""
        for entry in filter(files.is_image_file, files.iter_files(self._folder)):
            with suppress(FileNotFoundError):
                yield entry.name, entry.stat().st_size

    def _read(self, digest: str) -> bytes:
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
            "name the store that the image was put into ([media] root of a run, --media of a "
            "server), or put it again",
        )

    def _find(self, digest: str, renew: bool) -> bytes | None:
        """The bytes in `root`, checked; None when it has none. `renew` counts it as a use."""
        path = files.get_image_path(self._folder, digest)
        try:
            with files.open_image(path) as file:
                found = os.fstat(file.fileno())
                self.limits.check_bytes(found.st_size)
                data = verify_bytes(digest, file.read(found.st_size + 1))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (MediaCorrupt, MediaRefused) as error:
            raise type(error)(f"{error.problem}, in {path}", error.fix) from None
        except OSError as error:  # the cause, by which a server knows that it may heal
            fix = "let this user read the store, and check the disk under it"
            raise MediaError(f"cannot read {path}: {error.strerror}", fix) from error
        if renew and _is_stale(found.st_mtime) and not files.renew_last_use(self._folder, path):
            return None  # gc removed it while it was read
        return data

    def remove(self, digest: str) -> None:
        """Removes what nobody refers to any more, whatever its age; absent is as good."""
        path = self.path(digest)
        with self._disk_errors(), suppress(FileNotFoundError):
            num_bytes = path.stat().st_size
            path.unlink()
            with self._survey_lock:
                if self._survey:
                    self._survey.add(-num_bytes, num_files=-1)

    # --- looking after it

    def verify(self, progress: files.Progress | None = None) -> files.VerifyReport:
        """Read every file of `root` and report the damaged ones; nothing is removed."""
        return files.verify(self._folder, progress)

    def gc(
        self,
        in_use: Collection[str],
        min_age_s: float = 3600.0,
        *,
        dry_run: bool = False,
        progress: files.Progress | None = None,
    ) -> files.GcReport:
        """Remove images of `root` that are not `in_use` and had no use for `min_age_s` seconds.

        Images of a rollout in progress are in no file yet: what was put or used since a run took
        its lease stays until the lease ends.
        """
        # A set of refs or urls matches no digest, and would remove everything.
        for digest in in_use:
            check_digest(digest)
        report = self._gc(in_use, min_age_s, dry_run, progress)
        with self._survey_lock:
            self._survey = None
        return report

    def _gc(
        self,
        in_use: Collection[str],
        min_age_s: float,
        dry_run: bool,
        progress: files.Progress | None,
    ) -> files.GcReport:
        with self._disk_errors():
            return files.gc(self._folder, in_use, min_age_s, dry_run=dry_run, progress=progress)

    def renew_lease(self, name: str) -> None:
        """Say that the run called `name` goes on. What was put or used since the first call stays
        until `end_lease`, or until nobody has renewed the lease for half an hour."""
        with self._disk_errors():
            files.renew_lease(self._folder, name)

    def end_lease(self, name: str) -> None:
        with self._disk_errors():
            files.end_lease(self._folder, name)

    def size_bytes(self) -> int:
        """Bytes of all images in `root`; cheap enough to ask at every step.

        The files are counted anew when the last count is a minute old, or older where counting
        takes long (it gets at most 2% of the time). In between, what this process puts is added;
        what others put shows at the next count.
        """
        return self._get_survey().size_bytes

    def count(self) -> int:
        """Number of images in `root`; as fresh as `size_bytes`."""
        return self._get_survey().num_files

    def check_room(self, num_bytes: int = 0, beside: Iterable[MediaStore] = ()) -> None:
        """Raise `StoreFull` if `num_bytes` more would be above `max_bytes`, which also holds for
        the stores `beside` this one, or leave the disk with less than the reserve."""
        if self.max_bytes is not None:
            size = sum(store.size_bytes() for store in (self, *beside))
            if size + num_bytes > self.max_bytes:
                raise StoreFull(
                    f"the store {self.root} holds {size} bytes, its limit is {self.max_bytes}",
                    "free space with `sightline media gc`, or raise the limit: [media] max_gb of "
                    "a run, --max-media-gb of a server, --max-gb of a media service",
                )
        if isinstance(self.root, str):
            return  # its disk, if it has one, is looked at where it is
        existing = next(path for path in (self.root, *self.root.parents) if path.exists())
        if (free := shutil.disk_usage(existing).free) < self.reserve_bytes + num_bytes:
            raise StoreFull(
                f"the disk under {self.root} has {free} bytes left, {self.reserve_bytes} are "
                "kept in reserve",
                "free space on this disk, for instance with `sightline media gc`; a new run or "
                "server can have its images elsewhere: [media] root, --media",
            )

    def check_writable(self) -> None:
        """Raise `MediaError` unless images can be put here; makes the root if it is not there."""
        probe = (
            self._folder / f"{files.TEMPORARY_PREFIX}probe-{os.getpid()}-{threading.get_ident()}"
        )
        with self._disk_errors():
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            with files.lock_store(self._folder):
                probe.write_bytes(b"")
                probe.unlink()

    def _get_survey(self) -> _StoreSurvey:
        survey = self._survey
        if survey is None or survey.is_old():
            # Outside the lock: it may take long, and put must not wait.
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
    # In both directions, because the clock of a network disk may be ahead of ours.
    return abs(time.time() - last_use) > RENEW_AFTER_S


class _StoreSurvey:
    """How much the images of a root were, at one moment, plus what is added after it."""

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
