"""Tripwires before the forward pass: a message with names and counts, never a device assert."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, UInt8

from sightline.errors import Misaligned
from sightline.families import Family
from sightline.wire import Slot
from sightline.wire.micro_batch import MicroBatch

_FIX = "this data must not train; keep batches/ of the step and report it"


def check_micro_batch(
    batch: MicroBatch, family: Family, pad_ids: tuple[int, ...], vocab_size: int
) -> None:
    """Raises unless slots match pads, pads match slots, and ids are in the vocabulary."""
    token_ids = batch.token_ids.numpy()
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise _misaligned(
            batch, at, f"token id {int(token_ids[at])} of a vocabulary of {vocab_size}"
        )
    is_pad = np.isin(token_ids, np.asarray(family.slot_token_ids))
    in_slot = np.zeros(len(token_ids), dtype=bool)
    for slot in batch.slots:
        _check_slot(batch, slot, family, in_slot)
    if not np.array_equal(is_pad, in_slot):
        at = int(np.flatnonzero(is_pad != in_slot)[0])
        found = "a pad id outside every slot" if is_pad[at] else "a slot over an ordinary token"
        there = [s for s in batch.slots if s.offset <= at < s.end]
        image = _describe_image(batch, there[0]) if there else "no image"
        raise _misaligned(
            batch,
            at,
            f"{found} (id {int(token_ids[at])}, {image} there); the micro-batch has "
            f"{int(is_pad.sum())} pads, {int(in_slot.sum())} slot tokens and {len(batch.slots)} "
            "slots",
        )
    trained = batch.trained.numpy()
    banned = trained[np.isin(token_ids[trained], np.asarray(pad_ids))]
    if len(banned):
        at = int(banned[0])
        counts = f"{int(token_ids[at])}; {len(banned)} of {len(trained)}"
        raise _misaligned(batch, at, f"a banned token id is to be trained ({counts})")


def check_patches(batch: MicroBatch, patches: UInt8[np.ndarray, "patches values"] | None) -> None:
    """Raises unless there are as many patches as the grids of the distinct images say."""
    num = 0 if patches is None else len(patches)
    if num != batch.num_patches:
        raise Misaligned(
            f"{_describe_images(batch)}: {num} patches were made, their grids say "
            f"{batch.num_patches}",
            "the family's patches and its grids disagree",
        )


def check_features(batch: MicroBatch, num_features: int, family: Family) -> None:
    """Raises unless there are as many features as the slots of distinct images hold pads."""
    wanted = sum(len(family.feature_offsets(entry.item)) for entry in batch.items)
    if num_features != wanted:
        raise Misaligned(
            f"{_describe_images(batch)}: {num_features} features for {wanted} visual tokens",
            "the family's num_tokens and its vision tower disagree",
        )


def _check_slot(
    batch: MicroBatch, slot: Slot[int], family: Family, in_slot: Bool[np.ndarray, " tokens"]
) -> None:
    """Marks the pads of the slot, which is of an image, of its length, and alone there."""
    if not 0 <= slot.item < len(batch.items):
        problem = f"a slot of image {slot.item}, of {len(batch.items)} images"
        raise _misaligned(batch, slot.offset, problem)
    item = batch.items[slot.item].item
    name, wanted = _describe_image(batch, slot), family.num_tokens(item)
    if slot.length != wanted:
        problem = f"{name} has a slot of {slot.length} tokens and fills {wanted}"
        raise _misaligned(batch, slot.offset, problem)
    if slot.offset < 0 or slot.end > len(in_slot) or in_slot[slot.offset : slot.end].any():
        problem = f"{name} has a slot from {slot.offset} to {slot.end}"
        where = f"past the {len(in_slot)} tokens or over another's"
        raise _misaligned(batch, slot.offset, f"{problem}, {where}")
    in_slot[slot.offset + family.feature_offsets(item)] = True


def _misaligned(batch: MicroBatch, at: int, problem: str) -> Misaligned:
    token = f"step {batch.step}, sample {_find_sample(batch, at)}, token {at} of its micro-batch"
    return Misaligned(f"{token}: {problem}", _FIX)


def _describe_image(batch: MicroBatch, slot: Slot[int]) -> str:
    return batch.items[slot.item].item.name


def _describe_images(batch: MicroBatch) -> str:
    """Which images, and of whom: a count that is wrong over all of them names none alone."""
    named = [f"{e.item.name} of sample {e.wanted_by}" for e in batch.items[:4]]
    more = f" and {len(batch.items) - 4} more" if len(batch.items) > 4 else ""
    return f"step {batch.step}, {', '.join(named) or 'no images'}{more}"


def _find_sample(batch: MicroBatch, at: int) -> str:
    """The trace of a token: of one that trains and sees it, or that it sees."""
    trained, ends = batch.trained.numpy(), batch.subtree_end.numpy()
    at = min(max(at, 0), len(ends) - 1)
    sees = (trained >= at) & (trained < ends[at])
    seen = (trained <= at) & (at < ends[trained])
    numbers = (*np.flatnonzero(sees), *np.flatnonzero(seen))
    found = (o.trace_id for n in numbers for o in batch.origins if o.start <= n < o.stop)
    return next(found, "of no trained token")
