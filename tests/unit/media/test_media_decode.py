from __future__ import annotations

import io
import struct
import subprocess
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from sightline.errors import ConfigError, MediaError, MediaRefused, MediaUndecodable
from sightline.media import MediaStore
from sightline.media.decode import encode_png, inspect_image, open_rgb
from sightline.media.header import ImageLimits, exif_orientation

Picture = Callable[..., Image.Image]
Encode = Callable[..., bytes]


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + png_chunk(
        b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    )


def with_orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


# --- sizes and formats


def test_every_format_is_detected_from_its_bytes(every_format: dict[str, bytes]) -> None:
    for name, data in every_format.items():
        header = inspect_image(data)
        assert header.mime == f"image/{name.split('_')[0]}"
        assert (header.width, header.height) == ((24, 40) if "exif" in name else (40, 24))
        image = open_rgb(data)
        assert (image.mode, image.size) == ("RGB", (header.width, header.height))


@pytest.mark.parametrize("data", [b"", b"text", b"%PDF-1.7", b"BM" + b"\0" * 60, b"<svg/>"])
def test_bytes_of_an_unknown_format_are_refused(data: bytes) -> None:
    with pytest.raises(MediaRefused, match="not a PNG, JPEG, WebP, GIF"):
        inspect_image(data)


def test_animation_decodes_to_its_first_frame(picture: Picture, encode: Encode) -> None:
    first, second = picture(seed=0).quantize(40), picture(seed=99).quantize(40)
    data = encode(first, "GIF", save_all=True, append_images=[second])
    assert open_rgb(data).tobytes() == first.convert("RGB").tobytes()


# --- whole files


@settings(max_examples=60, deadline=None)
@given(cut=st.data())
def test_truncated_image_file_is_refused(
    every_format: dict[str, bytes], cut: st.DataObject
) -> None:
    for data in every_format.values():
        length = cut.draw(st.integers(0, len(data) - 1))
        with pytest.raises(MediaRefused):
            inspect_image(data[:length])


@pytest.mark.parametrize("name", ["png", "webp"])
def test_image_cut_between_chunks_is_refused(every_format: dict[str, bytes], name: str) -> None:
    data = every_format[name]
    cut = data[: data.index(b"IEND") - 4] if name == "png" else data[:-2]
    with pytest.raises(MediaRefused, match="lacks an IHDR, IDAT or IEND|the file has"):
        inspect_image(cut)


@settings(max_examples=60, deadline=None)
@given(change=st.data())
def test_changed_byte_never_yields_a_size_other_than_the_headers(
    every_format: dict[str, bytes], change: st.DataObject
) -> None:
    name = change.draw(st.sampled_from(sorted(every_format)))
    data = bytearray(every_format[name])
    data[change.draw(st.integers(0, len(data) - 1))] = change.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about EXIF that cannot be read
        try:
            header = inspect_image(bytes(data))
            image = open_rgb(bytes(data))
        except MediaError:
            return
    assert image.size == (header.width, header.height)


def test_a_png_chunk_with_a_wrong_checksum_is_refused(every_format: dict[str, bytes]) -> None:
    data = bytearray(every_format["png"])
    data[60] ^= 1
    with pytest.raises(MediaRefused, match="'IDAT' does not match its checksum"):
        inspect_image(bytes(data))


# --- limits


def test_limits_are_checked_from_the_header_before_any_pixel() -> None:
    bomb = png_header(30_000, 30_000) + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")
    with pytest.raises(MediaRefused, match="900000000 pixels"):
        inspect_image(bomb)
    with pytest.raises(MediaRefused, match="900000000 pixels"):
        open_rgb(bomb)


def png(*chunks: bytes, pixels: bytes) -> bytes:
    return b"".join(
        [png_header(8, 8), *chunks, png_chunk(b"IDAT", pixels), png_chunk(b"IEND", b"")]
    )


def test_huge_declared_size_is_refused_before_decoding(picture: Picture, encode: Encode) -> None:
    jpeg, gif, webp = (bytearray(encode(picture(), name)) for name in ("JPEG", "GIF", "WEBP"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = gif[6:10] = b"\xff\xff\xff\xff"
    webp[26:30] = b"\xff\x3f\xff\x3f"
    first = bytearray(encode(picture(), "GIF"))  # its first frame is larger than its canvas
    at = first.index(b",\0\0\0\0")
    first[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    for data in (jpeg, gif, webp, first):
        tracemalloc.start()
        with pytest.raises(MediaRefused, match="limit"):
            inspect_image(bytes(data))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_decompression_is_bounded_by_the_header_size() -> None:
    much = zlib.compress(bytes(64 << 20), 9)
    honest = zlib.compress(b"\0" * (8 * (1 + 8 * 3)), 9)
    for data in (
        png(pixels=much),
        png(png_chunk(b"zTXt", b"a\0\0" + much), pixels=honest),
        png(png_chunk(b"iCCP", b"a\0\0" + much), pixels=honest),
    ):
        tracemalloc.start()
        with suppress(MediaError):
            assert open_rgb(data).size == (8, 8)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
        tracemalloc.stop()


@pytest.mark.parametrize("place", ["missing", "before", "after"])
def test_palette_must_precede_the_pixels_of_a_png(place: str) -> None:
    palette = png_chunk(b"PLTE", b"\1\2\3")
    pixels = png_chunk(b"IDAT", zlib.compress(b"\0" * (8 * 9)))
    parts = {"missing": [pixels], "before": [palette, pixels], "after": [pixels, palette]}
    data = b"".join([png_header(8, 8, colour=3), *parts[place], png_chunk(b"IEND", b"")])
    if place == "before":
        assert open_rgb(data).getpixel((0, 0)) == (1, 2, 3)
    else:
        with pytest.raises(MediaRefused, match="no PLTE chunk precedes them"):
            inspect_image(data)


@pytest.mark.parametrize(
    "limits", [ImageLimits(max_bytes=50), ImageLimits(max_pixels=44), ImageLimits(max_side=8)]
)
def test_each_limit_is_enforced_independently(
    picture: Picture, encode: Encode, limits: ImageLimits
) -> None:
    data = encode(picture(9, 5), "PNG")
    inspect_image(data)
    with pytest.raises(MediaRefused, match="limit"):
        inspect_image(data, limits)


def test_image_without_pixels_is_refused(picture: Picture, encode: Encode) -> None:
    with pytest.raises(MediaRefused, match="0x4"):
        inspect_image(png_header(0, 4) + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b""))
    with pytest.raises(MediaRefused, match="IDAT"):
        inspect_image(png_header(2, 2) + png_chunk(b"IEND", b""))
    no_height = bytearray(encode(picture(), "JPEG"))
    frame = no_height.index(b"\xff\xc0")
    no_height[frame + 5 : frame + 7] = b"\0\0"
    with pytest.raises(MediaRefused, match="9x0"):
        inspect_image(bytes(no_height))


SLOW = {  # what Pillow would take many seconds for, by the budget that the refusal names
    "20000 chunks": lambda e: e["png"][:33] + 20_001 * png_chunk(b"prIv", b"") + e["png"][33:],
    "20000 segments": lambda e: e["jpeg"][:2] + b"\xff\x01" * 20_001 + e["jpeg"][2:],
    "20000 segments and fill bytes": lambda e: e["jpeg"][:2] + b"\xff" * 20_002 + e["jpeg"][2:],
    "16777216 bytes of metadata": lambda e: (
        e["jpeg"][:2] + 257 * (b"\xff\xe1\xff\xffExif\0\0" + bytes(65_527)) + e["jpeg"][2:]
    ),
    "100 scans": lambda e: e["jpeg"][:-2] + 100 * scan_of(e["jpeg"]) + b"\xff\xd9",
    "300000 data blocks": lambda e: e["gif"][:-1] + b"!\xfe" + b"\1." * 300_001 + b"\0;",
    "1048576 bytes before its first frame": lambda e: (
        e["gif"][:13] + e["gif"][13:781] + 5 * (b"!\xfe" + 900 * (b"\xff" * 256) + b"\0")
        + e["gif"][781:]
    ),
    "20000 chunks, the limit": lambda e: riff(e["webp"][12:] + b"junk\0\0\0\0" * 20_000),
}  # fmt: skip


def riff(chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def scan_of(jpeg: bytes) -> bytes:
    return jpeg[jpeg.rindex(b"\xff\xda") : -2]


@pytest.mark.parametrize("budget", SLOW)
def test_slow_to_decode_image_is_refused_without_decoding(
    every_format: dict[str, bytes], budget: str
) -> None:
    """`inspect_image` decodes nothing, and its own work has the same limits."""
    with pytest.raises(MediaRefused, match=f"more than {budget}"):
        inspect_image(SLOW[budget](every_format))


@pytest.mark.parametrize(
    ("name", "pixel_bytes"),
    [("png", 8), ("jpeg", 8), ("jpeg_progressive_exif", 10), ("webp", 17), ("gif", 8)],
)
def test_decoding_memory_is_bounded_by_the_header(
    every_format: dict[str, bytes], name: str, pixel_bytes: int
) -> None:
    needed = 40 * 24 * pixel_bytes
    open_rgb(every_format[name], ImageLimits(max_decoder_bytes=needed))
    with pytest.raises(MediaRefused, match=f"needs {needed} bytes of memory to decode, above the"):
        inspect_image(every_format[name], ImageLimits(max_decoder_bytes=needed - 1))


GROWTH = """
import resource, sys
from pathlib import Path
from sightline.media import decode
decode.warm_up()
data = Path(sys.argv[1]).read_bytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = decode.open_rgb(data).size
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / (size[0] * size[1]))
"""


def test_decoding_uses_the_estimated_memory(
    tmp_path: Path, encode: Encode, python: Callable[..., subprocess.Popen[str]]
) -> None:
    """Decode a rotated image with a transparent colour, which invites three copies."""
    flat = Image.new("RGB", (3000, 3000), (3, 4, 5))
    data = encode(flat, "PNG", exif=with_orientation(6), transparency=(3, 4, 5))
    assert len(data) < 100_000
    (tmp_path / "flat.png").write_bytes(data)
    output, problem = python(GROWTH, tmp_path / "flat.png").communicate()
    assert float(output) < 1.15 * inspect_image(data).decoder_bytes, problem


def test_decoding_is_refused_while_pillow_accepts_truncated_images(
    every_format: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(MediaError, match="LOAD_TRUNCATED_IMAGES is on"):
        open_rgb(every_format["png"])


# --- orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP"])
def test_orientation_matches_pillow(
    picture: Picture, encode: Encode, format_name: str, orientation: int
) -> None:
    lossless = {"WEBP": {"lossless": True}}.get(format_name, {})
    data = encode(picture(), format_name, exif=with_orientation(orientation), **lossless)
    header = inspect_image(data)
    assert header.orientation == orientation
    assert (header.width, header.height) == ((5, 9) if orientation >= 5 else (9, 5))

    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert open_rgb(data).tobytes() == expected.tobytes()
    assert open_rgb(data).size == expected.size


@given(block=st.binary(max_size=60))
@settings(deadline=None)
def test_any_exif_block_gives_an_orientation_from_1_to_8(block: bytes) -> None:
    assert 1 <= exif_orientation(b"MM\0*" + block) <= 8


# --- colours


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_png_mode_converts_to_rgb_like_pillow(
    picture: Picture, encode: Encode, mode: str
) -> None:
    image = picture(mode=mode)
    assert open_rgb(encode(image, "PNG")).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("transparency", [3, bytes(range(0, 160, 10))])
def test_a_transparent_palette_colour_keeps_its_colour_without_a_warning(
    picture: Picture, encode: Encode, transparency: int | bytes
) -> None:
    image = picture().quantize(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rgb = open_rgb(encode(image, "PNG", transparency=transparency))
    assert rgb.tobytes() == image.convert("RGB").tobytes()


def test_16_bit_grey_keeps_the_high_byte_of_each_value(encode: Encode) -> None:
    values = (0, 255, 256, 0x7FFF, 0x8000, 0xFFFF)
    image = Image.new("I;16", (len(values), 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    for decoded in (open_rgb(encode(image, "PNG")), open_rgb(encode_png(image))):
        assert [decoded.getpixel((x, 0)) for x in range(6)] == [(v >> 8,) * 3 for v in values]


def test_a_cmyk_jpeg_becomes_rgb(picture: Picture, encode: Encode) -> None:
    assert open_rgb(encode(picture(mode="CMYK"), "JPEG")).size == (9, 5)


# --- damage that only decoding finds


def test_undecodable_pixels_raise_instead_of_giving_a_blank_image() -> None:
    data = png_header(4, 4) + png_chunk(b"IDAT", b"not zlib") + png_chunk(b"IEND", b"")
    inspect_image(data)
    with pytest.raises(MediaUndecodable, match="image/png"):
        open_rgb(data)


# --- PIL images


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "PA"])
def test_pil_image_is_stored_as_displayed(picture: Picture, mode: str) -> None:
    image = picture(mode=mode)
    assert open_rgb(encode_png(image)).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_pil_image_is_put_upright(
    store: MediaStore, picture: Picture, encode: Encode, orientation: int
) -> None:
    """A photo gives the same pixels as bytes and as an opened image, however often it is put."""
    data = encode(picture(), "PNG", exif=with_orientation(orientation))
    ref = store.put(Image.open(io.BytesIO(data)))
    image = store.image(ref)
    assert (ref.width, ref.height) == ((5, 9) if orientation >= 5 else (9, 5))
    assert image.tobytes() == open_rgb(data).tobytes()
    assert store.put(image) == ref


def test_png_from_a_pil_image_is_deterministic_without_metadata(
    picture: Picture,
) -> None:
    plain, full = picture(), picture()
    full.info = {
        "dpi": (72, 72),
        "icc_profile": b"profile",
        "transparency": (1, 2, 3),
        "comment": b"c",
    }
    before = dict(full.info)
    assert encode_png(plain) == encode_png(full)
    assert full.info == before


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_pil_image_without_a_known_range_is_refused(mode: str) -> None:
    with pytest.raises(MediaRefused, match=f"mode {mode}"):
        encode_png(Image.new(mode, (3, 3)))


def test_pixel_limit_above_pillows_warning_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_pixels"):
        ImageLimits(max_pixels=200_000_000)
