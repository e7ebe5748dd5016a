"""Tripwires before the forward pass: a message with names and counts, never a device assert."""

from __future__ import annotations

import numpy as np

from sightline.errors import Misaligned
from sightline.families import Family
from sightline.wire.micro_batch import MicroBatch

_FIX = "this data must not train; keep batches/ of the step and report it"


def check_micro_batch(
    batch: MicroBatch, family: Family, pad_ids: tuple[int, ...], vocab_size: int
) -> None:
    """Slots against pads, pads against slots, ids against the vocabulary."""
    token_ids = batch.token_ids.numpy()
    where = f"micro-batch of step {batch.step}"
    if len(token_ids) and (int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size):
        raise Misaligned(
            f"{where}: token id {int(token_ids.max())} of a vocabulary of {vocab_size}", _FIX
        )
    is_pad = np.isin(token_ids, np.asarray(family.slot_token_ids))
    in_slot = np.zeros(len(token_ids), dtype=bool)
    for slot in batch.slots:
        item = batch.items[slot.item]
        name = f"{where}: image {item.item.ref.digest[:12]} of trace {item.wanted_by}"
        if slot.length != family.num_tokens(item.item):
            raise Misaligned(
                f"{name} has a slot of {slot.length} tokens and "
                f"{family.num_tokens(item.item)} features",
                _FIX,
            )
        in_slot[slot.offset : slot.offset + slot.length] = True
    if not np.array_equal(is_pad, in_slot):
        at = int(np.flatnonzero(is_pad != in_slot)[0])
        found = "a pad id outside every slot" if is_pad[at] else "a slot over an ordinary token"
        raise Misaligned(
            f"{where}: {found} at token {at} (id {int(token_ids[at])}); "
            f"{int(is_pad.sum())} pads, {int(in_slot.sum())} slot tokens",
            _FIX,
        )
    chosen = token_ids[batch.trained.numpy()]
    if np.isin(chosen, np.asarray(pad_ids)).any():
        raise Misaligned(f"{where}: a banned token id is to be trained", _FIX)
