"""Image decoding: the only place where Pillow opens an image.

Bytes and PIL images are rotated by their EXIF orientation, then converted as
`image.convert("RGB")` does, like the Pillow image processors of transformers. Alpha is dropped, not
blended with a background. 16-bit grey is an exception. Pillow would turn every value above 255
white, so the high byte of each value is used, as Pillow does with 16-bit colour. Colour profiles
are ignored, and only the first frame of an animation is used.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from sightline.errors import MediaError, MediaRefused, MediaUndecodable
from sightline.media.header import ImageHeader, ImageLimits, exif_orientation, read_header

if TYPE_CHECKING:
    from PIL.Image import Image as Image
    from PIL.ImageFile import ImageFile

DEFAULT_LIMITS = ImageLimits()

PNG_COMPRESS_LEVEL = 3
"""zlib level: screenshots are within 1% of the smallest size, at a fraction of the time."""


def inspect_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> ImageHeader:
    """Return the header of a complete image within `limits`, without decoding a pixel."""
    limits.check_bytes(len(data))
    header = read_header(data)
    limits.check_header(header)
    return header


def open_rgb(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image:
    """Decode an image to RGB, in exactly the size that `inspect_image` reports."""
    header = inspect_image(data, limits)
    fix = "save the image again with a program that can open it"
    reader = _get_reader(header.mime)
    try:
        with reader(io.BytesIO(data)) as image:
            image.load()
            image.info.pop("transparency", None)  # avoids a copy
            rgb = _convert_rgb(image)
        del image  # three images at once would exceed the memory limit
        rgb = _rotate_upright(rgb, header.orientation)
    except Exception as error:  # Pillow's readers raise many kinds on broken bytes
        what = f"{type(error).__name__}: {error}"
        raise MediaUndecodable(f"{header.mime} cannot be decoded ({what})", fix) from error
    if rgb.size != (header.width, header.height):
        raise MediaUndecodable(
            f"{header.mime} decodes to {rgb.width}x{rgb.height}, "
            f"its header says {header.width}x{header.height}",
            fix,
        )
    return rgb


def encode_png(image: Image) -> bytes:
    """Encode an image as an RGB PNG without metadata, with the pixels of `open_rgb`."""
    try:
        image.load()
        orientation = exif_orientation(image.info.get("exif") or b"")
        upright = _rotate_upright(_convert_rgb(image), orientation)
    except Exception as error:
        raise MediaRefused(
            f"a PIL image of mode {image.mode} cannot be converted to RGB ({error})",
            'convert it to mode "RGB" before you put it',
        ) from error
    out = io.BytesIO()
    upright.save(out, "PNG", compress_level=PNG_COMPRESS_LEVEL)
    return out.getvalue()


def warm_up() -> Image:
    """Encode and decode a small image, so that the first real one does not wait for codecs."""
    from PIL import Image as images

    return open_rgb(encode_png(images.new("RGB", (64, 64))))


def is_image_source(source: object) -> bool:
    """Return whether `MediaStore.put` accepts this."""
    return isinstance(source, bytes | bytearray | memoryview | Path) or is_pil_image(source)


def is_pil_image(source: object) -> bool:
    from PIL.Image import Image

    return isinstance(source, Image)


def _convert_rgb(image: Image) -> Image:
    """Return a new RGB image without changing `image`."""
    from PIL import Image as images

    if image.mode.startswith("I;16"):
        return images.frombytes("L", image.size, image.tobytes("raw", "I;16B")[::2]).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("its values have no known range")
    if "transparency" in image.info:
        # Pillow would convert the transparent colour too, and warn or fail.
        image = image.copy()
        del image.info["transparency"]
    rgb = image.convert("RGB")
    # An orientation left here would rotate the image again when it is put back.
    rgb.info = {}
    return rgb


def _rotate_upright(image: Image, orientation: int) -> Image:
    """Rotate an image with this EXIF orientation upright."""
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
    # Not Image.open: it guesses the format again, reads a JPEG with an index of further images as
    # another format, and applies a pixel limit that any library may have changed.
    from PIL import GifImagePlugin, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise MediaError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on: truncated images would decode silently",
            "do not set it in any module that this process imports",
        )
    return {
        "image/png": PngImagePlugin.PngImageFile,
        "image/jpeg": JpegImagePlugin.JpegImageFile,
        "image/webp": WebPImagePlugin.WebPImageFile,
        "image/gif": GifImagePlugin.GifImageFile,
    }[mime]
