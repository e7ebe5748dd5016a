"""The part of a long list that CI runs: always the same one. `FULL=1` runs all of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

IS_FULL = bool(os.environ.get("FULL"))


def take_first(items: Sequence[T], number: int) -> list[T]:
    """Return the first `number` items, or all of them in a full run."""
    return list(items if IS_FULL else items[:number])


def num_examples(full: int, quick: int) -> int:
    """Return how many inputs a property is tried on."""
    return full if IS_FULL else min(full, quick)
