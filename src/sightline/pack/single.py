"""Take sequences out of a micro-batch, to compute each without its neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch


def take_sequences(batch: MicroBatch) -> Iterator[tuple[MicroBatch, np.ndarray]]:
    """Yield each sequence up to its last trained token, from the last one in the pack.

    Also yield the places of its trained tokens among those of `batch`. All items stay.
    """
    trained, ends = batch.trained.numpy(), batch.subtree_end.numpy()
    lasts = {int(trained[origin.stop - 1]) for origin in batch.origins}
    paths = [np.flatnonzero(ends[: last + 1] > last) for last in sorted(lasts, reverse=True)]
    taken: set[int] = set()
    for path in paths:
        if int(path[-1]) not in taken:  # otherwise it is the start of another path
            taken.update(path.tolist())
            yield _take(batch, path)


def _take(batch: MicroBatch, path: np.ndarray) -> tuple[MicroBatch, np.ndarray]:
    trained = batch.trained.numpy()
    kept = np.flatnonzero(np.isin(trained, path))
    slots = [
        Slot(int(np.searchsorted(path, slot.offset)), slot.length, slot.item)
        for slot in batch.slots
        if np.isin(slot.end - 1, path)
    ]
    routes = batch.routes
    single = msgspec.structs.replace(
        batch,
        token_ids=Array.of(batch.token_ids.numpy()[path], "int32"),
        positions=Array.of(batch.positions.numpy()[:, path], "int32"),
        subtree_end=Array.of(np.full(len(path), len(path)), "int32"),
        parent=Array.of(np.arange(len(path)) - 1, "int32"),
        trained=Array.of(np.searchsorted(path, trained[kept]), "int32"),
        slots=slots,
        routes=None if routes is None else Array.of(routes.numpy()[path], routes.dtype),
        origins=[],
        **batch.take_trained(kept),
    )
    return single, kept
