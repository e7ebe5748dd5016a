"""Read an image's type and size from its bytes without decoding a pixel.

Each `_walk_*` function reads the structure of one format up to its end mark, so that a truncated
file is refused. It returns the stored width and height, the EXIF block, and the memory that
decoding needs. Bytes after the end mark are ignored, as decoders do. Elements that decoders process
slowly have limits: parts of a file, fill bytes, scans, comments.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from sightline.errors import ConfigError, MediaRefused

PILLOW_MAX_PIXELS = 89_000_000
"""Number of pixels above which Pillow warns of decompression bombs."""
MAX_PARTS = 20_000
"""Chunks, or segments and fill bytes, which Pillow reads one by one. Encoders write 8 KiB and more
at a time."""
MAX_SCANS = 100
"""Maximum number of JPEG scans, each over the whole image. A progressive JPEG has about ten."""
MAX_JPEG_METADATA_BYTES = 16 * 1024**2
"""Maximum bytes of JPEG segments outside of scans. Pillow joins EXIF blocks one by one."""
MAX_GIF_BLOCKS = 300_000
"""GIF frames, extensions, and their blocks of at most 255 bytes: 64 MiB fill 262,144."""
MAX_GIF_COMMENT_BYTES = 1024**2
"""Maximum bytes of a GIF before its first frame. Pillow joins its comments block by block."""
PNG_COLOR_TYPE, PNG_PALETTE = 25, 3
"""Offset of the color type in a PNG, and the type of images whose pixels refer to a palette."""
DECODER_BYTES = 8
"""Measured memory per pixel: four bytes of the decoder's image and four of RGB."""
WEBP_DECODER_BYTES = 17
"""libwebp uses two canvases, and returns a third."""


class ImageLimits(msgspec.Struct, frozen=True):
    """The limits of a store, checked with the header before anything is decoded."""

    max_bytes: int = 64 * 1024 * 1024
    max_pixels: int = 64_000_000
    max_side: int = 32_768
    max_decoder_bytes: int = 512 * 1024 * 1024
    """Peak memory of decoding."""
    max_frames: int = 36_000
    """Maximum number of frames of a video."""
    max_duration_s: float = 3600.0
    """Maximum length of a video in seconds."""
    max_video_pixels: int = 4_000_000_000
    """Maximum number of pixels of all frames of a video together."""
    max_decode_s: float = 60.0
    """Maximum processor time for all videos that a request puts, and for each pass that reads a
    file's frames."""

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)) <= 0:
            raise ConfigError(
                f"limits must be positive: {self}", "omit a limit to keep its default"
            )
        if self.max_pixels > PILLOW_MAX_PIXELS:
            raise ConfigError(
                f"max_pixels {self.max_pixels} is above {PILLOW_MAX_PIXELS}",
                "choose a smaller limit, and scale larger images down",
            )

    def check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise MediaRefused(
                f"it has {num_bytes} bytes, above the limit of {self.max_bytes}",
                "scale it down or compress it more",
            )

    def check_header(self, header: ImageHeader) -> None:
        self.check_size(header.width, header.height)
        needed = header.width * header.height * header.decoder_bytes
        if needed > self.max_decoder_bytes:
            raise MediaRefused(
                f"{header.mime} of {header.width}x{header.height} needs {needed} bytes of memory "
                f"to decode, above the limit of {self.max_decoder_bytes}",
                "scale it down",
            )

    def check_video(self, num_frames: int, duration_s: float, frame_pixels: int) -> None:
        if num_frames * frame_pixels > self.max_video_pixels:
            raise MediaRefused(
                f"the video has {num_frames} frames or more with {frame_pixels} pixels each, above "
                f"the limit of {self.max_video_pixels} pixels in all",
                "scale it down, split it, or encode it with fewer frames per second",
            )
        if num_frames > self.max_frames or duration_s > self.max_duration_s:
            raise MediaRefused(
                f"the video has {num_frames} frames and {duration_s:.1f} seconds or more, above "
                f"the limits of {self.max_frames} and {self.max_duration_s:g}",
                "split it, or encode it with fewer frames per second",
            )

    def check_size(self, width: int, height: int) -> None:
        is_small = max(width, height) <= self.max_side and width * height <= self.max_pixels
        if min(width, height) < 1 or not is_small:
            raise MediaRefused(
                f"image of {width}x{height} has {width * height} pixels; the limits are 1 pixel, "
                f"{self.max_pixels} pixels, and {self.max_side} pixels per side",
                "scale it to a size within the limits",
            )


class ImageHeader(NamedTuple):
    mime: str
    width: int
    height: int
    """Size after EXIF orientation."""
    orientation: int = 1
    """EXIF orientation of the stored pixels: 1 is upright, 5 to 8 swap the sides."""
    decoder_bytes: int = DECODER_BYTES
    """Peak memory of decoding, per pixel."""


def read_header(data: bytes) -> ImageHeader:
    """Return the header of a complete PNG, JPEG, WebP or GIF. Raise `MediaRefused` otherwise."""
    for name, pattern, walk in _FORMATS:
        if pattern.match(data):
            width, height, exif, decoder_bytes = walk(data)
            orientation = exif_orientation(exif)
            if orientation >= 5:
                width, height = height, width
            return ImageHeader(f"image/{name}", width, height, orientation, decoder_bytes)
    raise MediaRefused(
        f"{len(data)} bytes that begin with {data[:12]!r} are not a PNG, JPEG, WebP, GIF, MP4 or "
        "WebM",
        "convert it to one of these formats. The bytes count, not the name",
    )


def exif_orientation(exif: bytes) -> int:
    """Return the orientation, 1 to 8, in an EXIF block; 1 if it has none or cannot be read."""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (num_entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
            if tag == 0x0112 and kind in _EXIF_WHOLE_NUMBERS and count == 1:
                (value,) = struct.unpack_from(order + _EXIF_WHOLE_NUMBERS[kind], exif, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


_EXIF_WHOLE_NUMBERS = {1: "B", 3: "H", 4: "I"}


def _broken(format_name: str, problem: str) -> MediaRefused:
    return MediaRefused(
        f"the {format_name} is truncated or broken: {problem}",
        "send the whole file, or save the image again with a program that can open it",
    )


def _over_budget(format_name: str, what: str, limit: int) -> MediaRefused:
    return MediaRefused(
        f"the {format_name} has more than {limit} {what}, the limit",
        "save the image again with another program",
    )


_Walked = tuple[int, int, bytes, int]
"""Width, height, EXIF block, and decoding memory per pixel."""


def _iter_chunks(data: bytes, at: int, end: int, is_png: bool) -> Iterator[tuple[bytes, int, int]]:
    """Yield each chunk's kind, and the start and end of its body."""
    num_chunks, name = 0, "PNG" if is_png else "WebP"
    while at < end:
        if (num_chunks := num_chunks + 1) > MAX_PARTS:
            raise _over_budget(name, "chunks", MAX_PARTS)
        if at + 8 > end:
            raise _broken(name, f"{end - at} bytes at byte {at} are not a chunk")
        if is_png:
            length, kind = struct.unpack_from(">I4s", data, at)
        else:
            kind, length = struct.unpack_from("<4sI", data, at)
        start, stop = at + 8, at + 8 + length
        # A checksum follows in a PNG. In a WebP, bodies are padded to an even length.
        at = stop + (4 if is_png else length & 1)
        if (at if is_png else stop) > end:
            raise _broken(name, f"chunk {kind!r} needs {length} bytes, {end - start} follow")
        yield kind, start, stop


def _walk_png(data: bytes) -> _Walked:
    view, kinds, exif, size = memoryview(data), set[bytes](), b"", (0, 0)
    for kind, start, stop in _iter_chunks(data, 8, len(data), is_png=True):
        if zlib.crc32(view[start - 4 : stop]) != int.from_bytes(view[stop : stop + 4], "big"):
            raise _broken("PNG", f"chunk {kind!r} does not match its checksum")
        if not kinds and kind == b"IHDR" and stop - start == 13:
            size = struct.unpack_from(">II", data, start)
        elif kind == b"eXIf":
            exif = data[start:stop]
        elif kind == b"IDAT" and data[PNG_COLOR_TYPE] == PNG_PALETTE and b"PLTE" not in kinds:
            raise _broken("PNG", "its pixels refer to a palette, and no PLTE chunk precedes them")
        kinds.add(kind)
        if kind == b"IEND":
            break
    if not {b"IHDR", b"IDAT", b"IEND"} <= kinds:
        raise _broken("PNG", "it lacks an IHDR, IDAT or IEND chunk")
    return *size, exif, DECODER_BYTES


# In a scan's data, 0xFF is followed by 0x00 (stuffing), a restart mark or another 0xFF (fill).
# Anything else is the marker that ends the scan.
_JPEG_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JPEG_MARKER = re.compile(rb"\xff+([^\x00\xd8\xff])", re.DOTALL)
_JPEG_ALONE = {0x01, *range(0xD0, 0xD8)}
_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN, _JPEG_END, _JPEG_EXIF = 0xDA, 0xD9, 0xE1


def _walk_jpeg(data: bytes) -> _Walked:
    width = height = channels = num_parts = num_scans = metadata = 0
    exif, at = b"", 2
    while match := _JPEG_MARKER.match(data, at):
        marker, at = match[1][0], match.end()
        if (num_parts := num_parts + len(match[0]) - 1) > MAX_PARTS:
            raise _over_budget("JPEG", "segments and fill bytes", MAX_PARTS)
        if marker == _JPEG_END:
            break
        if marker in _JPEG_ALONE:
            continue
        length = int.from_bytes(data[at : at + 2], "big")
        body, end = at + 2, at + length
        if length < 2 or end > len(data):
            raise _broken("JPEG", f"segment {marker:#x} at byte {at} does not fit")
        if (metadata := metadata + length) > MAX_JPEG_METADATA_BYTES:
            raise _over_budget("JPEG", "bytes of metadata", MAX_JPEG_METADATA_BYTES)
        if marker in _JPEG_FRAMES:
            frame = data[body:end]
            if channels or frame[:1] != b"\x08" or frame[5:6] not in (b"\1", b"\3", b"\4"):
                raise _broken("JPEG", "it needs one frame of 1, 3 or 4 channels with 8 bits")
            height, width, channels = struct.unpack_from(">HHB", frame, 1)
        elif marker == _JPEG_EXIF and not exif and data.startswith(b"Exif\0\0", body):
            exif = data[body:end]
        elif marker == _JPEG_SCAN:
            if (num_scans := num_scans + 1) > MAX_SCANS:
                raise _over_budget("JPEG", "scans", MAX_SCANS)
            after = _JPEG_AFTER_SCAN.search(data, end)
            end = after.start() if after else len(data)
        at = end
    if not match or not channels or not num_scans:
        raise _broken("JPEG", f"byte {at} is not a marker, or nothing is before the end mark")
    # With several scans the decoder keeps the coefficients, two bytes per channel.
    decoder_bytes = 4 + 2 * channels if num_scans > 1 else DECODER_BYTES
    return width, height, exif, max(decoder_bytes, DECODER_BYTES)


def _walk_webp(data: bytes) -> _Walked:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise _broken("WebP", f"its header says {end} bytes, but the file has {len(data)}")
    size: tuple[int, int] | None = None
    says_exif = has_pixels = False
    exif = b""
    for kind, start, stop in _iter_chunks(data, 12, end, is_png=False):
        if size is None:
            size = _webp_size(kind, data[start : min(stop, start + 10)])
            says_exif = kind == b"VP8X" and bool(data[start] & 0x08)
        has_pixels |= kind in (b"VP8 ", b"VP8L", b"ANMF")
        # Decoders read the chunk only if the flag in VP8X announces it.
        if kind == b"EXIF" and says_exif and not exif:
            exif = data[start:stop]
    if size is None or not has_pixels:
        raise _broken("WebP", "it has no image chunk")
    return *size, exif, WEBP_DECODER_BYTES


def _webp_size(kind: bytes, body: bytes) -> tuple[int, int]:
    if kind == b"VP8X" and len(body) == 10:
        return (1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little"))
    if kind == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and len(body) == 10 and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return width & 0x3FFF, height & 0x3FFF
    raise _broken("WebP", f"its first chunk {kind!r} is not an image header")


def _walk_gif(data: bytes) -> _Walked:
    num_blocks, num_frames, at = 0, 0, 13
    try:
        width, height, flags = struct.unpack_from("<HHB", data, 6)
        at += _gif_table(flags)
        while (introducer := data[at]) != 0x3B:
            if introducer == 0x2C:
                left, top, across, down, flags = struct.unpack_from("<HHHHB", data, at + 1)
                if not num_frames:  # a frame larger than the canvas extends it, as in decoders
                    width, height = max(width, left + across), max(height, top + down)
                num_frames += 1
                at += 11 + _gif_table(flags)
            elif introducer == 0x21:
                at += 2
            else:
                raise _broken("GIF", f"byte {at} is {introducer:#x}, which starts no block")
            while data[at]:
                at += 1 + data[at]
                if (num_blocks := num_blocks + 1) > MAX_GIF_BLOCKS:
                    raise _over_budget("GIF", "data blocks", MAX_GIF_BLOCKS)
            at, num_blocks = at + 1, num_blocks + 1
            if not num_frames and at > MAX_GIF_COMMENT_BYTES:
                raise _over_budget("GIF", "bytes before its first frame", MAX_GIF_COMMENT_BYTES)
    except (IndexError, struct.error):
        raise _broken("GIF", f"it ends at byte {len(data)}, before its trailer") from None
    if not num_frames:
        raise _broken("GIF", "it has no frame")
    return width, height, b"", DECODER_BYTES


def _gif_table(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


_FORMATS: tuple[tuple[str, re.Pattern[bytes], Callable[[bytes], _Walked]], ...] = (
    ("png", re.compile(rb"\x89PNG\r\n\x1a\n"), _walk_png),
    ("jpeg", re.compile(rb"\xff\xd8\xff"), _walk_jpeg),
    ("webp", re.compile(rb"RIFF....WEBP", re.DOTALL), _walk_webp),
    ("gif", re.compile(rb"GIF8[79]a"), _walk_gif),
)
