"""Checks before the forward pass: a readable error instead of a device-side assert."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, UInt8

from sightline.errors import FamilyError, Misaligned
from sightline.families import Family
from sightline.wire import Slot
from sightline.wire.micro_batch import MicroBatch


def check_micro_batch(
    batch: MicroBatch, family: Family, pad_ids: tuple[int, ...], vocab_size: int
) -> None:
    """Raise unless slots and pad tokens match, and all ids are in the vocabulary."""
    check_positions(batch, family)
    token_ids, trained = batch.token_ids.numpy(), batch.trained.numpy()
    in_slot = np.zeros(len(token_ids), dtype=bool)
    for slot in batch.slots:
        _check_slot(batch, slot, family, in_slot)
    is_pad = np.isin(token_ids, np.asarray(family.slot_token_ids))
    is_banned = np.zeros(len(token_ids), dtype=bool)
    is_banned[trained] = np.isin(token_ids[trained], np.asarray(pad_ids))
    for is_wrong, problem in (
        ((token_ids < 0) | (token_ids >= vocab_size), f"outside the vocabulary of {vocab_size}"),
        (is_pad & ~in_slot, "a pad id outside every slot"),
        (in_slot & ~is_pad, "a slot over an ordinary token"),
        (is_banned, "a banned token id is to be trained"),
    ):
        if is_wrong.any():
            at = int(np.flatnonzero(is_wrong)[0])
            there = [batch.items[s.item].item.name for s in batch.slots if s.offset <= at < s.end]
            raise _misaligned(
                batch,
                at,
                f"{problem} (id {int(token_ids[at])}, {there[0] if there else 'no image'} there); "
                f"{int(is_wrong.sum())} such tokens, {int(is_pad.sum())} pads and "
                f"{len(batch.slots)} slots in the micro-batch",
            )


def check_positions(batch: MicroBatch, family: Family) -> None:
    """Raise if a sequence is longer than the checkpoint's rotary frequencies allow."""
    limit, longest = family.position_limit, int(batch.positions.numpy().max(initial=-1)) + 1
    if 0 < limit < longest:
        raise FamilyError(
            f"a sequence of {longest} positions, but the rotary frequencies of this checkpoint "
            f"change for all sequences of a batch when one exceeds {limit}",
            f"set [trainer] max_sequence_tokens = {limit}, or train on shorter conversations",
        )


def check_patches(batch: MicroBatch, patches: UInt8[np.ndarray, "patches values"] | None) -> None:
    """Raise unless the number of patches matches the grids of the distinct images."""
    num = 0 if patches is None else len(patches)
    if num != batch.num_patches:
        raise Misaligned(
            f"{_describe_images(batch)}: {num} patches were made, their grids say "
            f"{batch.num_patches}",
            "the family's patches and its grids disagree",
        )


def check_features(batch: MicroBatch, num_features: int, family: Family) -> None:
    """Raise unless the number of features matches the pads in the distinct images' slots."""
    num_pads = sum(len(family.feature_offsets(entry.item)) for entry in batch.items)
    if num_features != num_pads:
        raise Misaligned(
            f"{_describe_images(batch)}: {num_features} features cannot fill {num_pads} pads",
            "the family's num_tokens and its vision tower disagree",
        )


def _check_slot(
    batch: MicroBatch, slot: Slot[int], family: Family, in_slot: Bool[np.ndarray, " tokens"]
) -> None:
    """Mark the slot's pads. Raise if its image, length or position is wrong."""
    problem = ""
    if not 0 <= slot.item < len(batch.items):
        problem = f"a slot names image {slot.item} of {len(batch.items)}"
    elif slot.length != (num_pads := family.num_tokens(batch.items[slot.item].item)):
        name = batch.items[slot.item].item.name
        problem = f"{name} has a slot of {slot.length} tokens and fills {num_pads}"
    elif slot.offset < 0 or slot.end > len(in_slot) or in_slot[slot.offset : slot.end].any():
        place = f"past the {len(in_slot)} tokens or over another's"
        problem = f"a slot from {slot.offset} to {slot.end} is {place}"
    if problem:
        raise _misaligned(batch, slot.offset, problem)
    in_slot[slot.offset + family.feature_offsets(batch.items[slot.item].item)] = True


def _misaligned(batch: MicroBatch, at: int, problem: str) -> Misaligned:
    token = f"step {batch.step}, sample {_find_sample(batch, at)}, token {at} of its micro-batch"
    fix = "this data must not train. Keep batches/ of the step and report it"
    return Misaligned(f"{token}: {problem}", fix)


def _describe_images(batch: MicroBatch) -> str:
    """Name up to four images of the micro-batch, with their samples."""
    names = [f"{e.item.name} of sample {e.wanted_by}" for e in batch.items[:4]]
    return f"step {batch.step}, {', '.join(names) or 'no images'} ({len(batch.items)} images)"


def _find_sample(batch: MicroBatch, at: int) -> str:
    """Return the trace of a trained token that attends to token `at`, or that `at` attends to."""
    trained, ends = batch.trained.numpy(), batch.subtree_end.numpy()
    at = min(max(at, 0), len(ends) - 1)
    sees = (trained >= at) & (trained < ends[at])
    seen = (trained <= at) & (at < ends[trained])
    numbers = (*np.flatnonzero(sees), *np.flatnonzero(seen))
    names = (o.trace_id for n in numbers for o in batch.origins if o.start <= n < o.stop)
    return next(names, "of no trained token")
