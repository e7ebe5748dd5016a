"""From bytes to pixels: the one place where Pillow opens an image.

The rule, the same for bytes and for PIL images: turn by EXIF orientation, then do what
`image.convert("RGB")` does. Alpha is dropped, not blended with a background; a palette is looked
up; grey becomes three equal channels. transformers' Pillow image processors convert the same way.
16-bit grey is the exception: Pillow would cut every value above 255 to white, so it keeps the
high byte of each value, as Pillow itself does with 16-bit colour. Colour profiles are ignored.
Of an animation, the first frame counts.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from sightline.errors import MediaError, MediaRefused, MediaUndecodable
from sightline.media.header import ImageHeader, ImageLimits, exif_orientation, read_header

if TYPE_CHECKING:
    from PIL.Image import Image as Image
    from PIL.ImageFile import ImageFile

DEFAULT_LIMITS = ImageLimits()

# zlib level of PNGs made from PIL images: within 1% of the smallest for screenshots, at a
# fraction of the time. One Pillow build gives one digest for one picture; another may not.
PNG_COMPRESS_LEVEL = 3

# All that Pillow's readers raise on bytes that they cannot make sense of.
_DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    struct.error,
    zlib.error,
)


def inspect_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> ImageHeader:
    """Mime and size as seen, for a whole image within `limits`; no pixel is decoded."""
    limits.check_bytes(len(data))
    header = read_header(data)
    limits.check_header(header)
    return header


def open_rgb(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image:
    """The picture as an RGB image of exactly the size that `inspect_image` says."""
    header = inspect_image(data, limits)
    fix = "save the image again with a program that can open it, and put that"
    reader = _get_reader(header.mime)
    try:
        with reader(io.BytesIO(data)) as image:
            image.load()
            image.info.pop("transparency", None)  # or a copy would be made without it
            rgb = _convert_rgb(image)
        del image  # three pictures at once would be over the limit on memory
        rgb = _rotate_upright(rgb, header.orientation)
    except _DECODER_ERRORS as error:
        what = f"{type(error).__name__}: {error}"
        raise MediaUndecodable(f"{header.mime} that does not decode ({what})", fix) from error
    if rgb.size != (header.width, header.height):
        raise MediaUndecodable(
            f"{header.mime} decodes to {rgb.width}x{rgb.height}, "
            f"its header says {header.width}x{header.height}",
            fix,
        )
    return rgb


def encode_png(image: Image) -> bytes:
    """The picture as an RGB PNG without metadata, as `open_rgb` would show it."""
    try:
        image.load()
        upright = _rotate_upright(
            _convert_rgb(image), exif_orientation(image.info.get("exif") or b"")
        )
    except _DECODER_ERRORS as error:
        raise MediaRefused(
            f"a PIL image of mode {image.mode} cannot be made RGB ({error})",
            'convert it to mode "RGB" before it is put',
        ) from error
    out = io.BytesIO()
    upright.save(out, "PNG", compress_level=PNG_COMPRESS_LEVEL)
    return out.getvalue()


def warm_up() -> Image:
    """A small picture that was encoded and decoded, so that the first real one does not wait for
    the codecs to load."""
    from PIL import Image as images

    return open_rgb(encode_png(images.new("RGB", (64, 64))))


def is_image_source(source: object) -> bool:
    """Whether this is something that `MediaStore.put` takes."""
    return isinstance(source, bytes | bytearray | memoryview | Path) or is_pil_image(source)


def is_pil_image(source: object) -> bool:
    from PIL.Image import Image

    return isinstance(source, Image)


def _convert_rgb(image: Image) -> Image:
    """A new RGB image; `image` stays as it is."""
    from PIL import Image as images

    if image.mode.startswith("I;16"):
        high_bytes = image.tobytes("raw", "I;16B")[::2]
        return images.frombytes("L", image.size, high_bytes).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("its values have no range to scale from")
    if "transparency" in image.info:
        # Beside the pixels Pillow would convert the transparent colour too, and warn or fail.
        image = image.copy()
        del image.info["transparency"]
    rgb = image.convert("RGB")
    # An orientation left in here would turn the picture again when it is put back.
    rgb.info = {}
    return rgb


def _rotate_upright(image: Image, orientation: int) -> Image:
    """Upright, for an image stored with this EXIF orientation."""
    from PIL.Image import Transpose

    method = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(orientation)
    return image if method is None else image.transpose(method)


def _get_reader(mime: str) -> type[ImageFile]:
    # Not Image.open: it would guess the format anew, read a JPEG with an index of further
    # pictures as another format, and apply a pixel limit that any library may have changed.
    from PIL import GifImagePlugin, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise MediaError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on: images that were cut would decode silently",
            "leave it off in every module that this process imports",
        )
    return {
        "image/png": PngImagePlugin.PngImageFile,
        "image/jpeg": JpegImagePlugin.JpegImageFile,
        "image/webp": WebPImagePlugin.WebPImageFile,
        "image/gif": GifImagePlugin.GifImageFile,
    }[mime]
