"""Truncation of samples. Images are kept or removed as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from sightline.wire.array import Array
from sightline.wire.sample import Sample

CUT = "cut"
FIRST_IMAGE = "first image does not fit"
NOTHING_TRAINS = "nothing that trains fits"


def truncate(samples: Sequence[Sample], limit: int) -> tuple[list[Sample], Counter[str]]:
    """Return the samples cut to `limit` tokens, and counts of those cut or left out."""
    fitting: list[Sample] = []
    counts: Counter[str] = Counter()
    for sample in samples:
        if len(sample.token_ids) <= limit:
            fitting.append(sample)
            continue
        shorter = truncate_sample(sample, limit)
        if isinstance(shorter, Sample):
            fitting.append(shorter)
            shorter = CUT
        counts[shorter] += 1
    return fitting, counts


def truncate_sample(sample: Sample, limit: int) -> Sample | str:
    """Return the start of a sample up to its last trained token, or why nothing is left.

    A cut that would go through an image moves before it. A sample that loses its first image is
    left out: it would train the model to describe an image that it cannot see.
    """
    end = limit
    for slot in sample.slots:
        if slot.offset < end < slot.end:
            end = slot.offset
    slots = [slot for slot in sample.slots if slot.end <= end]
    if sample.slots and not slots:
        return FIRST_IMAGE
    num_trained = int((sample.trained.numpy() < end).sum())
    if num_trained == 0:
        return NOTHING_TRAINS
    end = int(sample.trained.numpy()[num_trained - 1]) + 1
    slots = [slot for slot in slots if slot.offset < end]
    used = sorted({slot.item for slot in slots})
    places = {old: new for new, old in enumerate(used)}
    of_trained = ("trained", "logprobs", "advantages", "versions", "teacher_logprobs")
    lengths = {"token_ids": end, "routes": end, **dict.fromkeys(of_trained, num_trained)}
    return msgspec.structs.replace(
        sample,
        **{
            name: Array.of(array.numpy()[:num], array.dtype)
            for name, num in lengths.items()
            if (array := getattr(sample, name)) is not None
        },
        segments=[
            msgspec.structs.replace(segment, stop=min(segment.stop, end))
            for segment in sample.segments
            if segment.start < end
        ],
        items=[sample.items[old] for old in used],
        slots=[msgspec.structs.replace(slot, item=places[slot.item]) for slot in slots],
    )
