"""Lay out the images of a prompt again, for a model of another family with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sightline.errors import FingerprintMismatch, MediaRefused
from sightline.families.protocol import Family
from sightline.wire import MediaItem, Slot


def lay_out_again(
    token_ids: Sequence[int], slots: Sequence[Slot], family: Family, pad_id: int
) -> tuple[list[int], list[Slot], np.ndarray]:
    """Return the ids and slots for `family`, and the new index of each token outside of slots.

    Slots get the pads that `family` needs for their images. All other ids stay the same.
    """
    ids: list[int] = []
    new_slots: list[Slot] = []
    index = np.zeros(len(token_ids), dtype=np.int64)
    start = 0
    for slot in slots:
        index[start : slot.offset] = np.arange(len(ids), len(ids) + slot.offset - start)
        ids += token_ids[start : slot.offset]
        item, pads = slot.item, list(token_ids[slot.offset : slot.end])
        if not _is_laid_out(item, family):
            if item.step is not None:
                fix = "use a teacher of the policy's family and processor settings"
                raise MediaRefused("another family cannot lay out videos again", fix)
            item = family.item(item.ref)
            pads = [pad_id] * family.num_tokens(item)
            if len(family.feature_offsets(item)) != len(pads):
                fix = "use a teacher whose images fill consecutive tokens"
                raise MediaRefused(f"{family.name} writes marks between an image's tokens", fix)
        new_slots.append(Slot(len(ids), len(pads), item))
        ids += pads
        start = slot.end
    index[start:] = np.arange(len(ids), len(ids) + len(token_ids) - start)
    return [*ids, *token_ids[start:]], new_slots, index


def _is_laid_out(item: MediaItem, family: Family) -> bool:
    """Return whether the item has the layout of `family`."""
    try:
        family.check_item(item)
    except (FingerprintMismatch, MediaRefused):
        return False
    return True
