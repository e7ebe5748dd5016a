"""Drawing helpers for the built-in tasks: digit bitmaps and PNG encoding."""

from __future__ import annotations

import io

from PIL import Image

_BITMAPS = (
    "111101101101111 010110010010111 110001010100111 111001011001111 101101111001001 "
    "111100110001110 011100111101111 111001010010010 111101010101111 111101111001110"
)
DIGITS = dict(zip("0123456789", _BITMAPS.split(), strict=True))
"""3x5 bitmaps."""


def encode_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def draw_glyph(bits: str, side: int) -> Image.Image:
    """Draw a 15-bit bitmap, black on white, stretched to a square."""
    image = Image.new("L", (3, 5))
    image.putdata([0 if bit == "1" else 255 for bit in bits])
    return image.resize((side, side), Image.Resampling.NEAREST)
