"""Video decoding: the only place where PyAV opens a video.

A packet holds one frame and its time. `put` therefore counts the frames without decoding them. When
frames are read, each must have the time that its packet announces, or the video cannot be decoded.
FFmpeg converts frames to RGB without scaling. Files with a rotation are refused. Sound is ignored.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
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
_NUM_TRIED = 2
"""Number of frames that are decoded when a video is put. One of them would not show that a packet
holds only half a frame."""
_VP8_IS_SHOWN = 0x10
"""Bit of a VP8 packet's first byte. Without it, the frame is hidden."""
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_FIX_SAVE = "save the video again as MP4 or WebM with a program that can play it"


class VideoHeader(NamedTuple):
    mime: str
    width: int
    height: int
    num_frames: int
    fps: float


def find_video_mime(data: bytes) -> str | None:
    """Return the mime type of a video's bytes; None for anything else, such as AVIF and HEIC."""
    if data[4:8] == b"ftyp" and data[8:12] not in (b"avif", b"heic", b"heix", b"mif1"):
        return "video/mp4"
    return "video/webm" if data[:4] == _EBML else None


class _Clock:
    """The processor time of decoding, which differs less between machines than elapsed time."""

    spent_s = 0.0

    @contextmanager
    def run(self, limits: ImageLimits) -> Iterator[None]:
        """Count the time of this context, and raise if the sum is above the limit."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.spent_s += time.thread_time() - began
        if self.spent_s > limits.max_decode_s:
            raise MediaRefused(
                f"decoding takes more than {limits.max_decode_s:g} s of processor time",
                "send fewer videos at once, scale them down, or split them",
            )


_shared_clock: ContextVar[_Clock | None] = ContextVar("shared_clock", default=None)


@contextmanager
def share_decode_time() -> Iterator[None]:
    """Apply the time limit to all videos together that are put in this context."""
    token = _shared_clock.set(_shared_clock.get() or _Clock())
    try:
        yield
    finally:
        _shared_clock.reset(token)


def inspect_video(
    data: bytes, mime: str, limits: ImageLimits = decode.DEFAULT_LIMITS
) -> VideoHeader:
    """Return a complete file's size, frames and rate. Decode only its first frames."""
    limits.check_bytes(len(data))
    (_check_boxes if mime == "video/mp4" else _check_segment)(data)
    clock = _shared_clock.get() or _Clock()
    with _open_stream(data, mime, limits, clock) as stream:
        announced, fps = int(stream.frames), float(stream.average_rate or stream.guessed_rate or 0)
        if not MIN_FPS <= fps <= MAX_FPS:
            raise MediaRefused(f"the {mime} has {fps:g} frames per second", _FIX_SAVE)
        codec = stream.codec_context
        limits.check_video(announced, announced / fps, codec.width * codec.height)
        times = _list_times(stream, limits, clock)
        limits.check_video(len(times), len(times) / fps, 0)
    with _open_stream(data, mime, limits, clock) as stream:
        first, *_ = list(islice(_decode(stream, limits, clock, times), _NUM_TRIED))
    # The header may have given another size.
    limits.check_video(len(times), 0.0, first.width * first.height)
    return VideoHeader(mime, first.width, first.height, len(times), fps)


class VideoReader:
    """Reader of one file's frames. It reads forwards and restarts for earlier frames. Reading in
    order decodes the file once. Thread-safe: the earliest requested frame comes first."""

    def __init__(self, data: bytes, ref: MediaRef, limits: ImageLimits) -> None:
        self._data, self._ref, self._limits = data, ref, limits
        self._turn = threading.Condition()
        self._waiting: list[int] = []
        self._is_busy = False
        self._times: list[int] = []
        self._frames: Iterator[Any] = iter(())
        self._last: tuple[int, Any] = (-1, None)
        """The number of the last decoded frame, and the frame."""
        self.num_starts = 0

    def read(self, numbers: Sequence[int]) -> list[Image]:
        """Return the frames with these ascending numbers, in RGB and in the ref's size."""
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
                    f"there is no frame {number}: the last is {self._last[0]}", _FIX_SAVE
                )
            self._last = (self._last[0] + 1, frame)
        return self._last[1].to_image()

    def _decode(self) -> Iterator[Any]:
        source, clock = (self._data, self._ref.mime, self._limits), _Clock()
        if not self._times:
            with _open_stream(*source, clock) as stream:
                self._times = _list_times(stream, self._limits, clock)
        if len(self._times) != self._ref.num_frames:
            raise MediaUndecodable(
                f"it has {len(self._times)} frames, its ref says {self._ref.num_frames}",
                "use refs from MediaStore.put or get_ref",
            )
        size = self._ref.width, self._ref.height
        with _open_stream(*source, clock) as stream:
            yield from _decode(stream, self._limits, clock, self._times, size)


class VideoReaders:
    """A few open readers of a store's videos, by digest."""

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
            raise type(error)(f"video {ref.digest[:12]}: {error.problem}", error.fix) from error

    def _get(self, ref: MediaRef) -> VideoReader:
        with self._lock:
            reader = self._readers.get(ref.digest)
        if reader is None:
            new_reader = VideoReader(self._get_bytes(ref), ref, self._limits)
            with self._lock:
                reader = self._readers.setdefault(ref.digest, new_reader)
        return reader


@contextmanager
def _open_stream(data: bytes, mime: str, limits: ImageLimits, clock: _Clock) -> Iterator[Any]:
    """Open the video stream of a file. PyAV's errors become `MediaUndecodable`."""
    av = import_av()
    # Only these bytes are read. Containers that refer to other files, and rare codecs, are refused.
    options = {"codec_whitelist": ",".join((*_CODECS, "libdav1d", "aac", "opus", "vorbis"))}
    try:
        with clock.run(limits):
            file = av.open(io.BytesIO(data), format=_FORMATS[mime], options=options)
        with file as container:
            streams = container.streams.video
            codec = streams[0].codec_context if len(streams) == 1 else None
            if codec is None or codec.codec.canonical_name not in _CODECS:
                raise MediaRefused(
                    f"the {mime} does not have exactly one video stream of a known codec",
                    f"encode it as one of {', '.join(_CODECS)}",
                )
            limits.check_size(codec.width, codec.height)
            # One thread each: the decoding pool has several. Damage is reported, not concealed.
            codec.thread_count = 1
            codec.options = {
                "err_detect": "crccheck+bitstream+buffer+explode",
                "max_pixels": str(limits.max_pixels),
            }
            yield streams[0]
    except MediaError:
        raise
    except (av.FFmpegError, ValueError) as error:
        what = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        raise MediaUndecodable(f"{mime} cannot be decoded ({what})", _FIX_SAVE) from error


def _list_times(stream: Any, limits: ImageLimits, clock: _Clock) -> list[int]:
    """Return the times of the frames in display order, from the packets, without decoding."""
    times: list[int] = []
    num_packets, announced = 0, int(stream.frames)
    codec, packets = stream.codec_context, stream.container.demux()
    is_vp8 = codec.codec.canonical_name == "vp8"
    while True:
        with clock.run(limits):  # also counts the packets of sound
            packet = next(packets, None)
        if packet is None:
            break
        if packet.stream_index != stream.index or not packet.size:
            continue
        num_packets += 1
        is_hidden = is_vp8 and not memoryview(packet)[0] & _VP8_IS_SHOWN
        if packet.pts is None:
            raise MediaRefused("a video whose frames have no times", _FIX_SAVE)
        if not is_hidden and not packet.is_discard:
            times.append(packet.pts)
        # A packet may hold a hidden frame, or half of an interlaced one.
        limits.check_video(max(len(times), num_packets // 2), 0.0, codec.width * codec.height)
    if not times or announced not in (0, num_packets):
        raise MediaRefused(
            f"the video has {num_packets} packets. Its header says {announced}",
            "send the whole file, or save it again with a program that can play it",
        )
    return sorted(times)


def _decode(
    stream: Any,
    limits: ImageLimits,
    clock: _Clock,
    times: Sequence[int],
    size: tuple[int, int] | None = None,
) -> Iterator[Any]:
    """Yield the frames in display order, all in one size and at their times."""
    num_frames = 0
    for packet in stream.container.demux(stream):
        with clock.run(limits):
            frames = packet.decode()
        for frame in frames:
            size = size or (frame.width, frame.height)
            if frame.is_corrupt or frame.rotation % 360 or (frame.width, frame.height) != size:
                raise MediaRefused(
                    f"a frame is damaged, is not {size[0]}x{size[1]}, or is rotated",
                    "encode the video again, upright, with a program that can play it",
                )
            limits.check_size(frame.width, frame.height)
            if num_frames == len(times) or frame.pts != times[num_frames]:
                raise MediaUndecodable(
                    f"frame {num_frames} of {len(times)} is missing or has another time", _FIX_SAVE
                )
            num_frames += 1
            yield frame
    if num_frames < len(times):
        raise MediaUndecodable(f"only {num_frames} of {len(times)} frames decode", _FIX_SAVE)


def import_av() -> Any:
    """Import PyAV, or raise with the command that installs it."""
    try:
        import av
    except ImportError as error:
        raise MediaError(
            "videos require PyAV, which is not installed", "run `pip install 'sightline-rl[video]'`"
        ) from error
    return av


def _check_boxes(data: bytes) -> None:
    """Raise if the boxes of an MP4 do not end where its bytes end."""
    at, kinds = 0, set()
    while at < len(data):
        size, head = int.from_bytes(data[at : at + 4], "big"), 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        size = len(data) - at if size == 0 else size
        if size < head or at + size > len(data):
            raise MediaRefused(
                f"truncated MP4: the box at byte {at} says {size} bytes, {len(data) - at} are left",
                "send the whole file",
            )
        kinds.add(data[at + 4 : at + 8])
        at += size
    if b"moov" not in kinds:
        raise MediaRefused("the MP4 has no moov box", _FIX_SAVE)


def _check_segment(data: bytes) -> None:
    """Raise if the segment of a WebM is longer than its bytes."""
    start = data.find(_SEGMENT, 0, 1024)
    if start < 0 or b"webm" not in data[:start]:
        raise MediaRefused("a Matroska file that is not WebM", _FIX_SAVE)
    at = start + len(_SEGMENT)
    num = 9 - data[at].bit_length() if at < len(data) and data[at] else 9
    size = int.from_bytes(data[at : at + num], "big") & ((1 << 7 * num) - 1)
    is_open = size == (1 << 7 * num) - 1
    if num > 8 or (not is_open and at + num + size > len(data)):
        raise MediaRefused(
            f"truncated WebM: its segment says {size} bytes, {len(data) - at - num} follow",
            "send the whole file",
        )
