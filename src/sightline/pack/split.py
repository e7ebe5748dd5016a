"""Take rollouts or sequences out of a micro-batch, to compute them without the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from jaxtyping import Bool, Int
from msgspec.structs import replace

from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class MicroBatchPart:
    batch: MicroBatch
    trains: Bool[np.ndarray, " trained"]
    """True for the trained tokens of the whole micro-batch that this part trains."""
    items: list[int]
    """The indices of its items in the whole micro-batch."""


def split_micro_batch(batch: MicroBatch) -> list[MicroBatchPart]:
    """Return two parts of about equal size, or nothing if the micro-batch has a single rollout.

    Their gradients add up to those of the whole.
    The second part of a tree repeats the tokens that its rollouts share with the first. Each
    rollout trains in one part.
    """
    ends, parents = batch.subtree_end.numpy(), batch.parent.numpy()
    num = len(ends)
    trained = batch.trained.numpy()
    best: list[tuple[Int[np.ndarray, " kept"], Bool[np.ndarray, " trained"]]] = []
    size = num
    for at in np.flatnonzero(parents[1:] != np.arange(num - 1)).tolist():
        start = at + 1  # a rollout starts here
        second = np.append(np.flatnonzero(ends[:start] > start), np.arange(start, num))
        larger = max(start, len(second))
        if larger < size:
            in_second = np.zeros(len(trained), dtype=bool)
            for _, nodes in groupby(batch.origins, key=lambda origin: origin.trace_id):
                origins = list(nodes)
                first, stop = origins[0].start, origins[-1].stop
                in_second[first:stop] = trained[first:stop].max(initial=-1) >= start
            if np.isin(trained[in_second], second).all():
                size = larger
                best = [(np.arange(start), ~in_second), (second, in_second)]
    return [_take(batch, *part) for part in best]


def take_sequences(batch: MicroBatch) -> Iterator[MicroBatchPart]:
    """Yield each sequence up to its last trained token, from the last one in the pack."""
    trained, ends = batch.trained.numpy(), batch.subtree_end.numpy()
    lasts = {int(trained[origin.stop - 1]) for origin in batch.origins}
    paths = [np.flatnonzero(ends[: last + 1] > last) for last in sorted(lasts, reverse=True)]
    taken: set[int] = set()
    for path in paths:
        if int(path[-1]) not in taken:  # otherwise it is the start of another path
            taken.update(path.tolist())
            yield _take(batch, path, np.isin(trained, path))


def _take(
    batch: MicroBatch, kept: Int[np.ndarray, " kept"], trains: Bool[np.ndarray, " trained"]
) -> MicroBatchPart:
    places = np.full(len(batch.token_ids) + 1, -1)  # the last entry is for the parent -1
    places[kept] = np.arange(len(kept))
    slots = [slot for slot in batch.slots if places[slot.offset] >= 0]
    items = sorted({slot.item for slot in slots})
    counts = np.cumsum([0, *trains])
    origins = [
        replace(origin, start=int(counts[origin.start]), stop=int(counts[origin.stop]))
        for origin in batch.origins
        if counts[origin.stop] > counts[origin.start]
    ]
    arrays = {
        "token_ids": batch.token_ids.numpy()[kept],
        "positions": batch.positions.numpy()[:, kept],
        "subtree_end": np.searchsorted(kept, batch.subtree_end.numpy()[kept]),
        "parent": places[batch.parent.numpy()[kept]],
        "trained": places[batch.trained.numpy()[trains]],
    }
    if batch.routes is not None:
        arrays["routes"] = batch.routes.numpy()[kept]
    part = replace(
        batch,
        items=[batch.items[item] for item in items],
        slots=[Slot(int(places[s.offset]), s.length, items.index(s.item)) for s in slots],
        origins=origins,
        **{name: Array.of(values, getattr(batch, name).dtype) for name, values in arrays.items()},
        **batch.take_trained(trains),
    )
    return MicroBatchPart(part, trains, items)
