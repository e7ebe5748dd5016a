"""What a quick run takes of a long list: a sample that the commit seeds. `FULL=1` takes all of it,
as `make full` does. `python tests/sampling.py 2 a b c` prints two of the three."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

IS_FULL = bool(os.environ.get("FULL"))


@cache
def get_commit() -> str:
    """The commit that is tested; empty where there is no git."""
    line = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(line, capture_output=True, text=True, timeout=10).stdout.strip()
    except OSError:
        return ""


def take_sample(items: Sequence[T], number: int) -> list[T]:
    """`number` of the items in their order, others for another commit; all in a full run."""
    if IS_FULL or number >= len(items):
        return list(items)
    chosen = random.Random(get_commit()).sample(range(len(items)), number)
    return [items[i] for i in sorted(chosen)]


def num_examples(full: int, quick: int) -> int:
    """How many inputs a property is tried on."""
    return full if IS_FULL else min(full, quick)


if __name__ == "__main__":
    print(*take_sample(sys.argv[2:], int(sys.argv[1])))
