"""What an image's bytes say about themselves, read without decoding a pixel.

Each `_walk_*` function goes through the structure of one format from its first byte to its end
mark, so that a file cut anywhere is refused here, and returns the width and height in which the
pixels are stored and the EXIF block, empty where there is none. Bytes after the end mark are
ignored, as decoders do.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sightline.errors import ConfigError, MediaRefused

# Above this Pillow's own decompression-bomb warning begins; ours come first, from the header.
PILLOW_MAX_PIXELS = 89_000_000


class ImageLimits(msgspec.Struct, frozen=True):
    """What a store takes. Checked from the header, before anything is decoded."""

    max_bytes: int = 64 * 1024 * 1024
    max_pixels: int = 64_000_000
    max_side: int = 32_768

    def __post_init__(self) -> None:
        if min(self.max_bytes, self.max_pixels, self.max_side) < 1:
            raise ConfigError(
                f"limits must be above 0: {self}", "leave a limit out to keep its default"
            )
        if self.max_pixels > PILLOW_MAX_PIXELS:
            raise ConfigError(
                f"max_pixels {self.max_pixels} is above {PILLOW_MAX_PIXELS}",
                "choose a smaller limit and scale larger images down before they are put",
            )

    def check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise MediaRefused(
                f"image of {num_bytes} bytes, above the limit of {self.max_bytes}",
                "scale it down or compress it more, or raise the limit on bytes",
            )

    def check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise MediaRefused(
                f"image of {width}x{height} pixels has none", "send an image with pixels in it"
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
    """As seen: after EXIF orientation."""
    orientation: int = 1
    """EXIF's number for how the stored pixels are turned: 1 is upright, 5 to 8 swap the sides."""


def read_header(data: bytes) -> ImageHeader:
    """The header of a whole PNG, JPEG, WebP or GIF; `MediaRefused` for anything else."""
    for mime, begins, walk in _FORMATS:
        if begins(data):
            width, height, exif = walk(data)
            orientation = exif_orientation(exif)
            if orientation >= 5:
                width, height = height, width
            return ImageHeader(mime, width, height, orientation)
    raise MediaRefused(
        f"{len(data)} bytes that begin with {data[:12]!r} are no PNG, JPEG, WebP or GIF",
        "convert the image to one of these formats; what counts is its bytes, not its name",
    )


def exif_orientation(exif: bytes) -> int:
    """The orientation, 1 to 8, in the first directory of an EXIF block; 1 when it says none.

    Only EXIF is asked. A block that cannot be read says nothing, as in every image viewer.
    """
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
        "send the whole file; this one was cut while being sent or written",
    )


def _broken(format_name: str, where: str) -> MediaRefused:
    return MediaRefused(
        f"broken {format_name}: {where}", "save the image again with a program that can open it"
    )


# --- PNG

# Bit depths that the standard allows for each colour type.
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


def _walk_png(data: bytes) -> tuple[int, int, bytes]:
    _check_follow(data, 8, 25, "PNG", "its first chunk")
    if data[8:16] != b"\0\0\0\x0dIHDR":
        raise _broken("PNG", f"its first chunk begins {data[8:16]!r}, not as IHDR of 13 bytes")
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    if depth not in _PNG_DEPTHS.get(colour, ()):
        raise _broken("PNG", f"colour type {colour} with {depth} bits does not exist")
    view = memoryview(data)
    seen: set[bytes] = set()
    exif = b""
    at = 8
    while b"IEND" not in seen:
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
        raise _broken("PNG", "it has no IDAT chunk, so no pixels")
    return width, height, exif


# --- JPEG

# In the coded data of a scan, 0xFF is followed by 0x00 (a stuffed byte), by a restart mark or by
# another 0xFF (fill). Anything else is the marker that ends the scan.
_JPEG_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JPEG_ALONE = {0x01, *range(0xD0, 0xD8)}
_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN, _JPEG_END, _JPEG_EXIF = 0xDA, 0xD9, 0xE1


def _walk_jpeg(data: bytes) -> tuple[int, int, bytes]:
    size: tuple[int, int] | None = None
    has_scan = False
    exif = b""
    at = 2
    while True:
        at, marker = _jpeg_marker(data, at)
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
        if marker in _JPEG_FRAMES:
            if size is not None:
                raise _broken("JPEG", f"a second frame header at byte {at - 2}")
            size = _jpeg_size(data[body:end])
        elif marker == _JPEG_EXIF and not exif and data.startswith(b"Exif\0\0", body):
            exif = data[body:end]
        elif marker == _JPEG_SCAN:
            has_scan = True
            match = _JPEG_AFTER_SCAN.search(data, end)
            if match is None:
                raise _truncated("JPEG", f"the scan at byte {at - 2} has no end mark behind it")
            end = match.start()
        at = end
    if size is None or not has_scan:
        raise _broken("JPEG", "it ends before any pixels")
    return *size, exif


def _jpeg_marker(data: bytes, at: int) -> tuple[int, int]:
    """The marker at `at` and the offset behind it."""
    start = at
    while at < len(data) and data[at] == 0xFF:
        at += 1
    if at >= len(data):
        raise _truncated("JPEG", f"the file ends at byte {len(data)}, before its end mark")
    if at == start or data[at] in (0x00, 0xD8):
        raise _broken("JPEG", f"no marker at byte {start}")
    return at + 1, data[at]


def _jpeg_size(frame: bytes) -> tuple[int, int]:
    if len(frame) < 6:
        raise _broken("JPEG", f"a frame header of {len(frame)} bytes")
    bits, height, width, channels = struct.unpack_from(">BHHB", frame)
    if bits != 8 or channels not in (1, 3, 4):
        raise MediaRefused(
            f"JPEG of {channels} channels with {bits} bits",
            "save it with 8 bits and 1, 3 or 4 channels",
        )
    return width, height


# --- WebP


def _walk_webp(data: bytes) -> tuple[int, int, bytes]:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise _truncated("WebP", f"its header says {end} bytes, the file has {len(data)}")
    size: tuple[int, int] | None = None
    says_exif = has_pixels = False
    exif = b""
    at = 12
    while at < end:
        if at + 8 > end:
            raise _broken("WebP", f"{end - at} bytes at byte {at} are no chunk")
        kind, length = struct.unpack_from("<4sI", data, at)
        body, stop = at + 8, at + 8 + length
        if stop > end:
            raise _broken("WebP", f"chunk {kind!r} at byte {at} says {length}, {end - body} follow")
        if size is None:
            size = _webp_size(kind, data[body : min(stop, body + 10)])
            says_exif = kind == b"VP8X" and bool(data[body] & 0x08)
        has_pixels |= kind in (b"VP8 ", b"VP8L", b"ANMF")
        # Decoders read the chunk only when the flag in VP8X announces it.
        if kind == b"EXIF" and says_exif and not exif:
            exif = data[body:stop]
        at = stop + (length & 1)
    if size is None or not has_pixels:
        raise _broken("WebP", "it has no image chunk")
    return *size, exif


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
    raise _broken("WebP", f"its first chunk {kind!r} is no image header")


# --- GIF


def _walk_gif(data: bytes) -> tuple[int, int, bytes]:
    _check_follow(data, 0, 13, "GIF", "its header")
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _gif_table(flags)
    first = True
    while True:
        if at >= len(data):
            raise _truncated("GIF", f"the file ends at byte {len(data)}, before its trailer")
        introducer = data[at]
        if introducer == 0x3B:
            break
        if introducer == 0x21:
            at = _gif_blocks(data, at + 2)
        elif introducer == 0x2C:
            _check_follow(data, at, 10, "GIF", f"the frame header at byte {at}")
            left, top, across, down, flags = struct.unpack_from("<HHHHB", data, at + 1)
            if first:  # a frame larger than the canvas widens it, as decoders do
                width, height = max(width, left + across), max(height, top + down)
            first = False
            at = _gif_blocks(data, at + 11 + _gif_table(flags))
        else:
            raise _broken("GIF", f"byte {at} is {introducer:#x}, which begins no block")
    if first:
        raise _broken("GIF", "it has no frame")
    return width, height, b""


def _gif_table(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _gif_blocks(data: bytes, at: int) -> int:
    """The offset behind a row of data blocks, which ends with an empty one."""
    start = at
    while at < len(data):
        if data[at] == 0:
            return at + 1
        at += 1 + data[at]
    raise _truncated("GIF", f"the data blocks at byte {start} have no end")


_Walk = Callable[[bytes], tuple[int, int, bytes]]
_FORMATS: tuple[tuple[str, Callable[[bytes], bool], _Walk], ...] = (
    ("image/png", lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"), _walk_png),
    ("image/jpeg", lambda data: data.startswith(b"\xff\xd8\xff"), _walk_jpeg),
    ("image/webp", lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", _walk_webp),
    ("image/gif", lambda data: data[:6] in (b"GIF87a", b"GIF89a"), _walk_gif),
)
