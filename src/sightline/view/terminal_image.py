"""Images in a terminal: half blocks, two pixels per character, in 24-bit colour."""

from __future__ import annotations

from PIL.Image import Image, Resampling

RESET = "\x1b[0m"


def draw_image(image: Image, columns: int = 32, rows: int = 12) -> list[str]:
    """Return lines of at most `columns` characters. Smaller images keep their size."""
    scale = min(1.0, columns / image.width, 2 * rows / image.height)
    width = max(1, round(image.width * scale))
    height = max(2, round(image.height * scale / 2) * 2)
    small = image.convert("RGB").resize((width, height), Resampling.BOX)

    def draw_cell(x: int, y: int) -> str:
        upper, lower = (";".join(map(str, small.getpixel((x, at)))) for at in (y, y + 1))  # type: ignore[arg-type]
        return f"\x1b[38;2;{upper}m\x1b[48;2;{lower}m▀"

    return ["".join(draw_cell(x, y) for x in range(width)) + RESET for y in range(0, height, 2)]
