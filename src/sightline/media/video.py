"""From the bytes of a video file to its frames: the one place where PyAV opens one.

A file is decoded whole when it is put, so that its ref names frames that are there: their number
is counted, not believed. Frames are RGB as FFmpeg converts them, without scaling; no turning is
applied, and a file that asks for it is refused. Sound is not looked at.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import LRUCache

from sightline.errors import MediaError, MediaRefused, MediaUndecodable
from sightline.media import decode
from sightline.media.header import ImageLimits
from sightline.media.ref import MAX_FPS, MIN_FPS, MediaRef

if TYPE_CHECKING:
    from sightline.media.decode import Image

MAX_OPEN_READERS = 4

_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
_FORMATS = {"video/mp4": "mp4", "video/webm": "webm"}
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_FIX_SAVE = "save the video again as MP4 or WebM with a program that can play it, and put that"


class VideoHeader(NamedTuple):
    mime: str
    width: int
    height: int
    num_frames: int
    fps: float


def find_video_mime(data: bytes) -> str | None:
    """The mime of bytes that begin as a video file does; None for all else."""
    if data[4:8] == b"ftyp":
        return "video/mp4"
    return "video/webm" if data[:4] == _EBML else None


def inspect_video(
    data: bytes, mime: str, limits: ImageLimits = decode.DEFAULT_LIMITS
) -> VideoHeader:
    """Size, frames and rate of a whole file within `limits`, every frame of which decodes."""
    limits.check_bytes(len(data))
    (_check_boxes if mime == "video/mp4" else _check_segment)(data)
    num_frames, size = 0, (0, 0)
    with _VideoFile(data, mime, limits) as file:
        announced, fps = int(file.stream.frames), file.read_fps()
        limits.check_video(announced, announced / fps)
        for frame in file.decode():
            num_frames += 1
            size = size if num_frames > 1 else (frame.width, frame.height)
            limits.check_video(num_frames, num_frames / fps)
    if not num_frames or announced not in (0, num_frames):
        raise MediaRefused(
            f"{mime} of {num_frames} frames; its header says {announced}",
            "send the whole file; this one was cut, or is broken",
        )
    return VideoHeader(mime, *size, num_frames, fps)


class VideoReader:
    """Frames of one file. It goes forwards, and begins again for one that it has passed: who reads
    a video from its beginning decodes it once. Safe for many threads, of which the one that wants
    the earliest frame goes first."""

    def __init__(self, data: bytes, ref: MediaRef, limits: ImageLimits) -> None:
        self._data, self._ref, self._limits = data, ref, limits
        self._turn = threading.Condition()
        self._waiting: list[int] = []
        self._is_busy = False
        self._frames: Iterator[Any] = iter(())
        self._last: tuple[int, Any] = (-1, None)
        """The frame that was decoded last, and its number."""
        self.num_starts = 0

    def read(self, numbers: Sequence[int]) -> list[Image]:
        """The frames of these numbers, which ascend, in RGB and of the ref's size."""
        first = numbers[0]
        with self._turn:
            self._waiting.append(first)
            self._turn.wait_for(lambda: not self._is_busy and first == min(self._waiting))
            self._waiting.remove(first)
            self._is_busy = True
        try:
            return [self._read_one(number) for number in numbers]
        finally:
            with self._turn:
                self._is_busy = False
                self._turn.notify_all()

    def _read_one(self, number: int) -> Image:
        if number < self._last[0] or not self.num_starts:
            self._frames, self._last = self._decode(), (-1, None)
            self.num_starts += 1
        while self._last[0] < number:
            frame = next(self._frames, None)
            if frame is None:
                raise MediaUndecodable(
                    f"no frame {number}: it ends with frame {self._last[0]}", _FIX_SAVE
                )
            self._last = (self._last[0] + 1, frame)
        return self._last[1].to_image()

    def _decode(self) -> Iterator[Any]:
        with _VideoFile(self._data, self._ref.mime, self._limits) as file:
            yield from file.decode((self._ref.width, self._ref.height))


class VideoReaders:
    """A few open readers of a store's videos; that of a video that comes again is kept."""

    def __init__(self, get: Callable[[MediaRef], bytes], limits: ImageLimits) -> None:
        self._get_bytes, self._limits = get, limits
        self._readers: LRUCache[str, VideoReader] = LRUCache(MAX_OPEN_READERS)
        self._lock = threading.Lock()

    def read(self, ref: MediaRef, numbers: Sequence[int]) -> list[Image]:
        try:
            return self._get(ref).read(numbers)
        except (MediaUndecodable, MediaRefused) as error:
            with self._lock:
                self._readers.pop(ref.digest, None)
            problem = f"video {ref.digest[:12]}: {error.problem}"
            raise type(error)(problem, error.fix) from error

    def _get(self, ref: MediaRef) -> VideoReader:
        with self._lock:
            reader = self._readers.get(ref.digest)
        if reader is None:
            made = VideoReader(self._get_bytes(ref), ref, self._limits)
            with self._lock:
                reader = self._readers.setdefault(ref.digest, made)
        return reader


class _VideoFile:
    """An open file with one kind of error: what PyAV raises becomes ours."""

    def __init__(self, data: bytes, mime: str, limits: ImageLimits) -> None:
        self._data, self._mime, self._limits = data, mime, limits

    def __enter__(self) -> _VideoFile:
        av = import_av()
        # Nothing but the bytes is read: a container that names other files, or a codec that is
        # seldom tried, is refused before it is opened.
        options = {"codec_whitelist": ",".join((*_CODECS, "libdav1d", "aac", "opus", "vorbis"))}
        try:
            self._container = av.open(
                io.BytesIO(self._data), format=_FORMATS[self._mime], options=options
            )
        except (av.FFmpegError, ValueError) as error:
            raise self._build_error(error) from error
        try:
            self._open_stream()
        except BaseException:
            self._container.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def _open_stream(self) -> None:
        streams = self._container.streams.video
        if len(streams) != 1:
            raise MediaRefused(f"{self._mime} with {len(streams)} pictures at once", _FIX_SAVE)
        self.stream = streams[0]
        codec = self.stream.codec_context
        name = None if codec is None else codec.codec.canonical_name
        if name not in _CODECS:
            raise MediaRefused(
                f"{self._mime} of the codec {name}", f"encode it as one of {', '.join(_CODECS)}"
            )
        self._limits.check_size(codec.width, codec.height)
        # One thread each: the pool that decodes has its own. What is damaged is not made up.
        codec.thread_count = 1
        codec.options = {
            "err_detect": "crccheck+bitstream+buffer+explode",
            "max_pixels": str(self._limits.max_pixels),
        }

    def read_fps(self) -> float:
        fps = float(self.stream.average_rate or self.stream.guessed_rate or 0)
        if not MIN_FPS <= fps <= MAX_FPS:
            raise MediaRefused(f"{self._mime} of {fps:g} frames a second", _FIX_SAVE)
        return fps

    def decode(self, size: tuple[int, int] | None = None) -> Iterator[Any]:
        """The frames in the order in which they are shown, all of one size."""
        av = import_av()
        try:
            for frame in self._container.decode(self.stream):
                size = size or (frame.width, frame.height)
                if frame.is_corrupt or (frame.width, frame.height) != size:
                    what = "is damaged" if frame.is_corrupt else f"is not {size[0]}x{size[1]}"
                    raise MediaRefused(f"{self._mime}, a frame of which {what}", _FIX_SAVE)
                self._limits.check_size(frame.width, frame.height)
                if frame.rotation % 360:
                    raise MediaRefused(
                        f"{self._mime} that is to be turned by {frame.rotation} degrees",
                        "encode it upright: ffmpeg -i FILE, without -noautorotate, does",
                    )
                yield frame
        except (av.FFmpegError, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            raise self._build_error(error) from error

    def _build_error(self, error: Exception) -> MediaUndecodable:
        what = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        return MediaUndecodable(f"{self._mime} that does not decode ({what})", _FIX_SAVE)


def import_av() -> Any:
    """PyAV, which an installation has that decodes videos."""
    try:
        import av
    except ImportError as error:
        raise MediaError(
            "videos are decoded by PyAV, which is not installed",
            "install it: pip install 'sightline-rl[video]'",
        ) from error
    return av


def _check_boxes(data: bytes) -> None:
    """The boxes of an MP4 end where its bytes end."""
    at, kinds = 0, set()
    while at < len(data):
        size, head = int.from_bytes(data[at : at + 4], "big"), 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        size = len(data) - at if size == 0 else size
        if size < head or at + size > len(data):
            raise MediaRefused(
                f"truncated MP4: the box at byte {at} says {size} bytes, {len(data) - at} are left",
                "send the whole file; this one was cut while being sent or written",
            )
        kinds.add(data[at + 4 : at + 8])
        at += size
    if b"moov" not in kinds:
        raise MediaRefused("MP4 without a header of its tracks", _FIX_SAVE)


def _check_segment(data: bytes) -> None:
    """The segment of a WebM ends where its bytes end, or says nothing of its end."""
    start = data.find(_SEGMENT, 0, 1024)
    if start < 0 or b"webm" not in data[:start]:
        raise MediaRefused("Matroska that is no WebM", _FIX_SAVE)
    at = start + len(_SEGMENT)
    num = 9 - data[at].bit_length() if at < len(data) and data[at] else 9
    size = int.from_bytes(data[at : at + num], "big") & ((1 << 7 * num) - 1)
    is_open = size == (1 << 7 * num) - 1
    if num > 8 or (not is_open and at + num + size > len(data)):
        raise MediaRefused(
            f"truncated WebM: its segment says {size} bytes, {len(data) - at - num} are there",
            "send the whole file; this one was cut while being sent or written",
        )
