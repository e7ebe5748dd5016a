"""MRoPE: three positions a token, along time, height and width.

Text advances all three by one. An image begins where the text left off on all three, its tokens
take their place in the merged grid, and the text goes on behind the longer side of that grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sightline.families.vision_family import check_slots_fit
from sightline.wire import Slot

NUM_AXES = 3


def compute_mrope_positions(
    num_tokens: int, slots: Sequence[Slot], merge: int, start: int = 0
) -> tuple[np.ndarray, int]:
    """int32 (3, num_tokens) from `start` on, and the position of the token that comes next."""
    check_slots_fit(slots, merge, num_tokens)
    placed = np.empty((NUM_AXES, num_tokens), dtype=np.int32)
    done, position = 0, start
    for slot in slots:
        t, rows, columns = slot.item.grid
        h, w = rows // merge, columns // merge
        text = slot.offset - done
        placed[:, done : slot.offset] = np.arange(position, position + text, dtype=np.int32)
        position += text
        done = slot.offset + slot.length
        place = placed[:, slot.offset : done]
        place[:] = np.indices((t, h, w), dtype=np.int32).reshape(NUM_AXES, -1)
        place += position
        position += max(h, w)
    text = num_tokens - done
    placed[:, done:] = np.arange(position, position + text, dtype=np.int32)
    return placed, position + text
