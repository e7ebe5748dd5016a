"""Resize images to whole visual tokens within pixel limits, by transformers' arithmetic."""

from __future__ import annotations

import math

from sightline.errors import MediaRefused

MAX_ASPECT = 200


def fit_area(
    width: int, height: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the height and width of a resized image: multiples of `factor` within the limits."""
    _check_aspect(width, height, f"{width}x{height}")
    # A side under half a factor rounds to 0; the area is then 0, and the lower limit corrects it.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        return _shrink(width, height, math.sqrt((height * width) / max_pixels), factor)
    if new_height * new_width < min_pixels:
        return _grow(width, height, math.sqrt(min_pixels / (height * width)), factor)
    return new_height, new_width


def fit_volume(
    width: int,
    height: int,
    num_frames: int,
    temporal: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Return the height and width of resized frames: multiples of `factor`.

    The limits apply to all frames together, rounded to whole steps of `temporal`.
    """
    size = f"{width}x{height}"
    if min(width, height) < 1:
        raise MediaRefused(f"an image of {size} has no pixels", "send another image")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(width, height, size)
    rounded = round(num_frames / temporal) * temporal
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if rounded * new_height * new_width > max_pixels:
        beta = math.sqrt(num_frames * height * width / max_pixels)
        return _shrink(width, height, beta, factor)
    if rounded * new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (num_frames * height * width))
        return _grow(width, height, beta, factor)
    return new_height, new_width


def _check_aspect(width: int, height: int, size: str) -> None:
    if min(width, height) < 1 or max(width, height) / min(width, height) > MAX_ASPECT:
        raise MediaRefused(
            f"an image of {size} is more than {MAX_ASPECT} times as long as wide",
            "crop it, or split it into several images",
        )


def _shrink(width: int, height: int, beta: float, factor: int) -> tuple[int, int]:
    return (
        max(factor, math.floor(height / beta / factor) * factor),
        max(factor, math.floor(width / beta / factor) * factor),
    )


def _grow(width: int, height: int, beta: float, factor: int) -> tuple[int, int]:
    return (
        math.ceil(height * beta / factor) * factor,
        math.ceil(width * beta / factor) * factor,
    )
