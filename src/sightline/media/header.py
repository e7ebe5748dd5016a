"""Read an image's type and size from its bytes without decoding a pixel.

Each `_walk_*` function reads the structure of one format up to its end mark, so that a truncated
file is refused. It returns the stored width and height, the EXIF block, and the memory that
decoding needs. Bytes after the end mark are ignored, as decoders do. Whatever takes decoders too
much time for its size has a limit: parts of a file, fill bytes, scans, comments.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sightline.errors import ConfigError, MediaRefused

PILLOW_MAX_PIXELS = 89_000_000
"""Pillow warns of decompression bombs above this."""
MAX_PARTS = 20_000
"""Chunks or segments, which Pillow reads one by one. Encoders write 8 KiB and more at a time."""
MAX_FILL_BYTES = 65_536
"""JPEG fill bytes, which Pillow reads one by one."""
MAX_SCANS = 100
"""JPEG scans, each over the whole image. A progressive JPEG has about ten."""
MAX_JPEG_METADATA_BYTES = 16 * 1024**2
"""JPEG segments outside of scans. Pillow joins EXIF blocks one by one."""
MAX_GIF_BLOCKS = 300_000
"""GIF blocks of at most 255 bytes: 64 MiB fill 262,144."""
MAX_GIF_COMMENT_BYTES = 1024**2
"""GIF extensions before the first frame, which Pillow joins block by block."""
DECODER_BYTES = 8
"""Measured memory per pixel: four bytes of the decoder's image and four of RGB."""
WEBP_DECODER_BYTES = 17
"""libwebp uses two canvases, and returns a third."""


class ImageLimits(msgspec.Struct, frozen=True):
    """The limits of a store, checked from the header before anything is decoded."""

    max_bytes: int = 64 * 1024 * 1024
    max_pixels: int = 64_000_000
    max_side: int = 32_768
    max_decoder_bytes: int = 512 * 1024 * 1024
    """Peak memory of decoding."""
    max_frames: int = 36_000
    """Frames of a video, which are all decoded when it is put."""
    max_duration_s: float = 3600.0
    """Seconds of a video."""

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)) < 1:
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
                f"{num_bytes} bytes, above the limit of {self.max_bytes}",
                "scale it down or compress it more, or raise the limit on bytes",
            )

    def check_header(self, header: ImageHeader) -> None:
        self.check_size(header.width, header.height)
        needed = header.width * header.height * header.decoder_bytes
        if needed > self.max_decoder_bytes:
            raise MediaRefused(
                f"{header.mime} of {header.width}x{header.height} needs {needed} bytes of memory "
                f"to decode, above the limit of {self.max_decoder_bytes}",
                "scale it down, or raise the limit on the decoder's memory",
            )

    def check_video(self, num_frames: int, duration_s: float) -> None:
        if num_frames > self.max_frames or duration_s > self.max_duration_s:
            raise MediaRefused(
                f"video of {num_frames} frames and {duration_s:.1f} seconds or more, above the "
                f"limits of {self.max_frames} and {self.max_duration_s:g}",
                "split it, or encode it with fewer frames per second",
            )

    def check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise MediaRefused(
                f"image of {width}x{height} has no pixels", "send an image with pixels"
            )
        if max(width, height) > self.max_side:
            raise MediaRefused(
                f"image of {width}x{height} has a side above the limit of {self.max_side}",
                "scale it down, or raise the limit on sides",
            )
        if width * height > self.max_pixels:
            raise MediaRefused(
                f"image of {width}x{height} has {width * height} pixels, "
                f"above the limit of {self.max_pixels}",
                "scale it down, or raise the limit on pixels",
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
    """Return the header of a complete PNG, JPEG, WebP or GIF; raise `MediaRefused` otherwise."""
    for mime, begins, walk in _FORMATS:
        if begins(data):
            width, height, exif, decoder_bytes = walk(data)
            orientation = exif_orientation(exif)
            if orientation >= 5:
                width, height = height, width
            return ImageHeader(mime, width, height, orientation, decoder_bytes)
    raise MediaRefused(
        f"{len(data)} bytes that begin with {data[:12]!r} are not a PNG, JPEG, WebP, GIF, MP4 or "
        "WebM",
        "convert it to one of these formats; the bytes count, not the name",
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


def _check_follow(data: bytes, at: int, num_bytes: int, format_name: str, what: str) -> None:
    if at + num_bytes > len(data):
        left = max(0, len(data) - at)
        raise _truncated(format_name, f"{what} needs {num_bytes} bytes, {left} follow")


def _truncated(format_name: str, where: str) -> MediaRefused:
    return MediaRefused(
        f"truncated {format_name}: {where}",
        "send the whole file",
    )


def _broken(format_name: str, where: str) -> MediaRefused:
    return MediaRefused(
        f"broken {format_name}: {where}", "save the image again with a program that can open it"
    )


def _over_budget(format_name: str, what: str, limit: int) -> MediaRefused:
    return MediaRefused(
        f"{format_name} with more than {limit} {what}, the limit",
        "save the image again with another program",
    )


_Walked = tuple[int, int, bytes, int]
"""Width, height, EXIF block, and decoding memory per pixel."""

# --- PNG

# Valid bit depths for each colour type.
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


def _walk_png(data: bytes) -> _Walked:
    _check_follow(data, 8, 25, "PNG", "its first chunk")
    if data[8:16] != b"\0\0\0\x0dIHDR":
        raise _broken("PNG", f"its first chunk is {data[8:16]!r}, not an IHDR of 13 bytes")
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    if depth not in _PNG_DEPTHS.get(colour, ()):
        raise _broken("PNG", f"colour type {colour} with {depth} bits does not exist")
    view = memoryview(data)
    seen: set[bytes] = set()
    exif = b""
    at, num_chunks = 8, 0
    while b"IEND" not in seen:
        if (num_chunks := num_chunks + 1) > MAX_PARTS:
            raise _over_budget("PNG", "chunks", MAX_PARTS)
        _check_follow(data, at, 8, "PNG", f"the chunk at byte {at}, before any IEND,")
        length, kind = struct.unpack_from(">I4s", data, at)
        name, body, end = kind.decode("latin-1"), at + 8, at + 12 + length
        _check_follow(data, body, length + 4, "PNG", f"chunk {name!r} at byte {at}")
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise _broken("PNG", f"chunk {name!r} at byte {at} does not match its checksum")
        if kind == b"eXIf":
            exif = data[body : end - 4]
        seen.add(kind)
        at = end
    if b"IDAT" not in seen:
        raise _broken("PNG", "it has no IDAT chunk")
    return width, height, exif, DECODER_BYTES


# --- JPEG

# In a scan's data, 0xFF is followed by 0x00 (stuffing), a restart mark or another 0xFF (fill).
# Anything else is the marker that ends the scan.
_JPEG_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JPEG_FILL = re.compile(rb"\xff+")
_JPEG_ALONE = {0x01, *range(0xD0, 0xD8)}
_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN, _JPEG_END, _JPEG_EXIF = 0xDA, 0xD9, 0xE1


def _walk_jpeg(data: bytes) -> _Walked:
    size: list[int] = []
    num_segments = num_scans = fill = metadata = channels = 0
    exif = b""
    at = 2
    while True:
        start = at
        at, marker = _jpeg_marker(data, at)
        fill, num_segments = fill + at - start - 2, num_segments + 1
        if metadata > MAX_JPEG_METADATA_BYTES:
            raise _over_budget("JPEG", "bytes of metadata", MAX_JPEG_METADATA_BYTES)
        if fill > MAX_FILL_BYTES:
            raise _over_budget("JPEG", "fill bytes", MAX_FILL_BYTES)
        if num_segments > MAX_PARTS:
            raise _over_budget("JPEG", "segments", MAX_PARTS)
        if marker == _JPEG_END:
            break
        if marker in _JPEG_ALONE:
            continue
        segment = f"segment {marker:#x} at byte {at - 2}"
        _check_follow(data, at, 2, "JPEG", segment)
        length = int.from_bytes(data[at : at + 2], "big")
        body, end = at + 2, at + length
        if length < 2:
            raise _broken("JPEG", f"{segment} says {length} bytes")
        _check_follow(data, at, length, "JPEG", segment)
        metadata += length
        if marker in _JPEG_FRAMES:
            if size:
                raise _broken("JPEG", f"a second frame header at byte {at - 2}")
            *size, channels = _jpeg_size(data[body:end])
        elif marker == _JPEG_EXIF and not exif and data.startswith(b"Exif\0\0", body):
            exif = data[body:end]
        elif marker == _JPEG_SCAN:
            if (num_scans := num_scans + 1) > MAX_SCANS:
                raise _over_budget("JPEG", "scans", MAX_SCANS)
            match = _JPEG_AFTER_SCAN.search(data, end)
            if match is None:
                raise _truncated("JPEG", f"the scan at byte {at - 2} has no end mark")
            end = match.start()
        at = end
    if not size or not num_scans:
        raise _broken("JPEG", "it ends before any pixels")
    # With several scans the decoder keeps the coefficients, two bytes per channel.
    decoder_bytes = 4 + 2 * channels if num_scans > 1 else DECODER_BYTES
    return size[0], size[1], exif, max(decoder_bytes, DECODER_BYTES)


def _jpeg_marker(data: bytes, at: int) -> tuple[int, int]:
    """Return the offset after the marker at `at`, and the marker."""
    start = at
    if fill := _JPEG_FILL.match(data, at):
        at = fill.end()
    if at >= len(data):
        raise _truncated("JPEG", f"the file ends at byte {len(data)}, before its end mark")
    if at == start or data[at] in (0x00, 0xD8):
        raise _broken("JPEG", f"no marker at byte {start}")
    return at + 1, data[at]


def _jpeg_size(frame: bytes) -> tuple[int, int, int]:
    """Return width, height and channels."""
    if len(frame) < 6:
        raise _broken("JPEG", f"a frame header of {len(frame)} bytes")
    bits, height, width, channels = struct.unpack_from(">BHHB", frame)
    if bits != 8 or channels not in (1, 3, 4):
        raise MediaRefused(
            f"JPEG of {channels} channels with {bits} bits",
            "save it with 8 bits and 1, 3 or 4 channels",
        )
    return width, height, channels


# --- WebP


def _walk_webp(data: bytes) -> _Walked:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise _truncated("WebP", f"its header says {end} bytes, the file has {len(data)}")
    size: tuple[int, int] | None = None
    says_exif = has_pixels = False
    exif = b""
    at, num_chunks = 12, 0
    while at < end:
        if (num_chunks := num_chunks + 1) > MAX_PARTS:
            raise _over_budget("WebP", "chunks", MAX_PARTS)
        if at + 8 > end:
            raise _broken("WebP", f"{end - at} bytes at byte {at} are not a chunk")
        kind, length = struct.unpack_from("<4sI", data, at)
        body, stop = at + 8, at + 8 + length
        if stop > end:
            raise _broken("WebP", f"chunk {kind!r} at byte {at} says {length}, {end - body} follow")
        if size is None:
            size = _webp_size(kind, data[body : min(stop, body + 10)])
            says_exif = kind == b"VP8X" and bool(data[body] & 0x08)
        has_pixels |= kind in (b"VP8 ", b"VP8L", b"ANMF")
        # Decoders read the chunk only if the flag in VP8X announces it.
        if kind == b"EXIF" and says_exif and not exif:
            exif = data[body:stop]
        at = stop + (length & 1)
    if size is None or not has_pixels:
        raise _broken("WebP", "it has no image chunk")
    return *size, exif, WEBP_DECODER_BYTES


def _webp_size(kind: bytes, body: bytes) -> tuple[int, int]:
    if kind == b"VP8X" and len(body) == 10:
        return (
            1 + int.from_bytes(body[4:7], "little"),
            1 + int.from_bytes(body[7:10], "little"),
        )
    if kind == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and len(body) == 10 and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return width & 0x3FFF, height & 0x3FFF
    raise _broken("WebP", f"its first chunk {kind!r} is not an image header")


# --- GIF


def _walk_gif(data: bytes) -> _Walked:
    _check_follow(data, 0, 13, "GIF", "its header")
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _gif_table(flags)
    first = True
    num_parts = num_blocks = comment = 0
    while True:
        if (num_parts := num_parts + 1) > MAX_PARTS:
            raise _over_budget("GIF", "frames and extensions", MAX_PARTS)
        if at >= len(data):
            raise _truncated("GIF", f"the file ends at byte {len(data)}, before its trailer")
        introducer = data[at]
        if introducer == 0x3B:
            break
        if introducer == 0x21:
            start = at
            at, num_blocks = _gif_blocks(data, at + 2, num_blocks)
            comment += at - start if first else 0
            if comment > MAX_GIF_COMMENT_BYTES:
                raise _over_budget("GIF", "bytes before its first frame", MAX_GIF_COMMENT_BYTES)
        elif introducer == 0x2C:
            _check_follow(data, at, 10, "GIF", f"the frame header at byte {at}")
            left, top, across, down, flags = struct.unpack_from("<HHHHB", data, at + 1)
            if first:  # a frame larger than the canvas extends it, as in decoders
                width, height = max(width, left + across), max(height, top + down)
            first = False
            at, num_blocks = _gif_blocks(data, at + 11 + _gif_table(flags), num_blocks)
        else:
            raise _broken("GIF", f"byte {at} is {introducer:#x}, which starts no block")
    if first:
        raise _broken("GIF", "it has no frame")
    return width, height, b"", DECODER_BYTES


def _gif_table(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _gif_blocks(data: bytes, at: int, num_blocks: int) -> tuple[int, int]:
    """Return the offset after a sequence of data blocks, and their number."""
    start = at
    while at < len(data):
        if data[at] == 0:
            return at + 1, num_blocks
        at += 1 + data[at]
        if (num_blocks := num_blocks + 1) > MAX_GIF_BLOCKS:
            raise _over_budget("GIF", "data blocks", MAX_GIF_BLOCKS)
    raise _truncated("GIF", f"the data blocks at byte {start} have no end")


_Walk = Callable[[bytes], _Walked]
_FORMATS: tuple[tuple[str, Callable[[bytes], bool], _Walk], ...] = (
    ("image/png", lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"), _walk_png),
    ("image/jpeg", lambda data: data.startswith(b"\xff\xd8\xff"), _walk_jpeg),
    ("image/webp", lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", _walk_webp),
    ("image/gif", lambda data: data[:6] in (b"GIF87a", b"GIF89a"), _walk_gif),
)
