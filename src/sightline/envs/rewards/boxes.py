"""Rewards for boxes and points in an image. Coordinates are pixels from its top left corner.

`layout` says how a reference gives a box, and the answer in `iou`: `xyxy` or `xywh`. With
`answer_range`, such as 1000, coordinates of the answer run from 0 to this number over the image in
the row's column `image`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
_NUMBER = r"(?<![\w.])-?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?(?!\w)"
_RUN = re.compile(rf"{_NUMBER}(?:[\s,;()\[\]\"']+{_NUMBER})*", re.IGNORECASE)
_KEY = re.compile(r"""["']?\b[xy](?:\d|min|max)?["']?\s*[=:]\s*["']?""", re.IGNORECASE)


def iou(
    answer: str,
    expected: Any,
    row: Mapping[str, Any] | None = None,
    threshold: float = 0.0,
    layout: str = "xyxy",
    answer_range: float = 0.0,
    image: str = "image",
) -> float:
    """Return the intersection over union of the answer's box and the reference.

    Several boxes are paired greedily, best first. The sum is divided by the larger number of boxes.
    With `threshold`, a pair counts 1 if it reaches the threshold, and 0 otherwise.
    """
    x, y = _get_scale(row, image, answer_range)
    references = _read_reference(expected, layout)
    groups = _find_groups(answer, 4)
    boxes = [_to_box((a * x, b * y, c * x, d * y), layout) for a, b, c, d in groups]
    pairs = [
        (_get_iou(box, reference), i, j)
        for i, box in enumerate(boxes)
        for j, reference in enumerate(references)
    ]
    total, used = 0.0, set[tuple[str, int]]()
    for score, i, j in sorted(pairs, reverse=True):
        if used.isdisjoint({("box", i), ("reference", j)}):
            used |= {("box", i), ("reference", j)}
            total += float(score >= threshold) if threshold else score
    return total / max(len(boxes), len(references))


def points(
    answer: str,
    expected: Any,
    row: Mapping[str, Any] | None = None,
    layout: str = "xyxy",
    answer_range: float = 0.0,
    image: str = "image",
) -> float:
    """Return the number of reference boxes with a point of their own in the answer, as a fraction.

    A point takes the smallest free box that it is in. The divisor is the number of boxes or of
    points, whichever is larger.
    """
    width, height = _get_scale(row, image, answer_range)
    free = sorted(_read_reference(expected, layout), key=lambda box: _get_area(*box))
    num_boxes, given = len(free), [(x * width, y * height) for x, y in _find_groups(answer, 2)]
    for x, y in given:
        hit = next((b for b in free if b[0] <= x <= b[2] and b[1] <= y <= b[3]), None)
        if hit is not None:
            free.remove(hit)
    return (num_boxes - len(free)) / max(num_boxes, len(given))


def _find_groups(text: str, size: int) -> list[list[float]]:
    """Return the numbers of a text in groups. Runs of numbers that do not divide are left out."""
    groups = []
    for run in _RUN.findall(_KEY.sub("", text)):
        numbers = [float(word) for word in re.findall(_NUMBER, run, re.IGNORECASE)]
        if len(numbers) % size == 0 and all(map(math.isfinite, numbers)):
            groups += [numbers[at : at + size] for at in range(0, len(numbers), size)]
    return groups


def _read_reference(expected: Any, layout: str) -> list[Box]:
    """Return the boxes of a reference: four numbers, a list of those, or their text."""
    if isinstance(expected, str):
        expected = _find_groups(expected, 4)
    if isinstance(expected, list) and expected and not isinstance(expected[0], list):
        expected = [expected]
    try:
        boxes = [_to_box([float(value) for value in box], layout) for box in expected]
    except (TypeError, ValueError) as error:
        raise ValueError(f"the reference {expected!r} is not a box: {error}") from error
    if not boxes or not all(left < right and top < low for left, top, right, low in boxes):
        raise ValueError(f"the reference {expected!r} has no box, or an empty one")
    return boxes


def _to_box(values: Sequence[float], layout: str) -> Box:
    left, top, right, bottom = values
    if layout == "xywh":
        right, bottom = left + right, top + bottom
    elif layout != "xyxy":
        raise ValueError(f"layout = {layout!r} is neither 'xyxy' nor 'xywh'")
    return left, top, right, bottom


def _get_area(left: float, top: float, right: float, bottom: float) -> float:
    return max(right - left, 0.0) * max(bottom - top, 0.0)


def _get_iou(first: Box, second: Box) -> float:
    common = _get_area(*map(max, first[:2], second[:2]), *map(min, first[2:], second[2:]))
    union = _get_area(*first) + _get_area(*second) - common
    return common / union if common and math.isfinite(union) else 0.0


def _get_scale(row: Mapping[str, Any] | None, image: str, answer_range: float) -> tuple[float, ...]:
    """Return the factors from the answer's coordinates to the reference's."""
    if not answer_range:
        return 1.0, 1.0
    ref = (row or {}).get(image)
    ref = ref[0] if isinstance(ref, list) and ref else ref
    if not ref:
        raise ValueError(f"answer_range needs an image in the column {image!r}")
    return ref.width / answer_range, ref.height / answer_range
