"""Sizes of images and of frames of videos, by the arithmetic of transformers' processors."""

from __future__ import annotations

import dataclasses
import math

from sightline.errors import MediaRefused
from sightline.families.qwen_vl.settings import ProcessorSettings, VideoSettings

MAX_ASPECT = 200


def fit_frames(
    width: int, height: int, num_frames: int, settings: VideoSettings, images: ProcessorSettings
) -> tuple[int, int]:
    """Height and width to which each frame of a video is resized."""
    factor, largest = images.factor, settings.max_pixels
    floor = int(settings.min_pixels * 1.05)
    most_tokens = settings.max_video_tokens
    if settings.is_joined:
        if most_tokens:
            total = int(most_tokens * factor * factor * 0.9) * images.temporal
            largest = max(min(largest, total // num_frames), floor)
        limits = dataclasses.replace(images, min_pixels=settings.min_pixels, max_pixels=largest)
        return fit_size(width, height, limits)
    if most_tokens:
        share = max(min(most_tokens * factor * factor, largest // num_frames), floor)
        largest = share * num_frames
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(width, height)
    rounded = round(num_frames / images.temporal) * images.temporal
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if rounded * new_height * new_width > largest:
        beta = math.sqrt(num_frames * height * width / largest)
        return _shrink(width, height, beta, factor)
    if rounded * new_height * new_width < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / (num_frames * height * width))
        return _grow(width, height, beta, factor)
    return new_height, new_width


def fit_size(width: int, height: int, settings: ProcessorSettings) -> tuple[int, int]:
    """Height and width to resize to: multiples of the factor whose area is within the limits."""
    _check_aspect(width, height)
    factor = settings.factor
    # A side under half a factor rounds to 0; the area is then 0 and the lower limit mends it.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > settings.max_pixels:
        return _shrink(width, height, math.sqrt((height * width) / settings.max_pixels), factor)
    if new_height * new_width < settings.min_pixels:
        return _grow(width, height, math.sqrt(settings.min_pixels / (height * width)), factor)
    return new_height, new_width


def _check_aspect(width: int, height: int) -> None:
    if min(width, height) < 1 or max(width, height) / min(width, height) > MAX_ASPECT:
        raise MediaRefused(
            f"an image of {width}x{height}: one side is over {MAX_ASPECT} times the other",
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
