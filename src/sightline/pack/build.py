"""Builds a micro-batch from units of samples. Shared tokens appear once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sightline.errors import PixelMismatch
from sightline.families import Family
from sightline.pack.tree import PackRow, PackUnit, measure_unit
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, PackedItem, TokenOrigin
from sightline.wire.sample import Sample


def build_micro_batch(
    units: Sequence[PackUnit], step: int, family: Family, weight_of: Mapping[int, float]
) -> MicroBatch:
    """Lay the units out one after another. Each attends only to itself."""
    builder = _MicroBatchBuilder(family, sum(measure_unit(unit).tokens for unit in units))
    for unit in units:
        for row in unit:
            builder.add(row)
        builder.leave(0)
    samples = [row.sample for unit in units for row in unit]
    return MicroBatch(
        step=step,
        token_ids=Array.of(np.concatenate(builder.token_ids), "int32"),
        positions=Array.of(np.concatenate(builder.positions, axis=1), "int32"),
        subtree_end=Array.of(builder.subtree_end, "int32"),
        parent=Array.of(np.concatenate(builder.parents), "int32"),
        trained=Array.of(np.concatenate(builder.trained), "int32"),
        logprobs=Array.of(np.concatenate([s.logprobs.numpy() for s in samples]), "float32"),
        advantages=Array.of(np.concatenate([s.get_advantages() for s in samples]), "float32"),
        loss_weight=Array.of(
            np.concatenate([np.full(len(s.trained), weight_of[id(s)]) for s in samples]), "float32"
        ),
        versions=Array.of(np.concatenate([s.versions.numpy() for s in samples]), "int32"),
        items=builder.items,
        slots=builder.slots,
        origins=builder.origins,
        temperature=samples[0].temperature,
        routes=_lay_out_routes(samples, builder),
        teacher_logprobs=_concatenate([s.teacher_logprobs for s in samples]),
    )


def _concatenate(arrays: Sequence[Array | None]) -> Array | None:
    """Return one array, or None if one is missing."""
    present = [array.numpy() for array in arrays if array is not None]
    return Array.of(np.concatenate(present), "float32") if len(present) == len(arrays) else None


def _lay_out_routes(samples: Sequence[Sample], builder: _MicroBatchBuilder) -> Array | None:
    """Return the routes of all tokens. A shared token has those of the first sample with any."""
    known = next((sample.routes for sample in samples if sample.routes is not None), None)
    if known is None:
        return None
    unknown = np.iinfo(known.dtype).max
    routes = np.full((len(builder.subtree_end), *known.shape[1:]), unknown, known.dtype)
    for sample, path in zip(samples, builder.paths, strict=True):
        if sample.routes is not None:
            is_new = routes[path, 0, 0] == unknown
            routes[path[is_new]] = sample.routes.numpy()[is_new]
    return Array.of(routes, known.dtype)


class _MicroBatchBuilder:
    """A micro-batch under construction. `_path` holds the places of the current row's tokens."""

    def __init__(self, family: Family, num_tokens: int) -> None:
        self._family = family
        self._path = np.zeros(0, dtype=np.int64)
        self.subtree_end = np.zeros(num_tokens, dtype=np.int64)
        self._num_tokens = 0
        self._num_trained = 0
        self.token_ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.parents: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        self._places: dict[str, int] = {}
        self.items: list[PackedItem] = []
        self.slots: list[Slot[int]] = []
        self.origins: list[TokenOrigin] = []
        self.paths: list[np.ndarray] = []  # the places of each row's tokens

    def add(self, row: PackRow) -> None:
        sample, shared = row.sample, row.shared
        self.leave(shared)
        new = np.arange(self._num_tokens, self._num_tokens + len(sample.token_ids) - shared)
        self._path = np.concatenate([self._path, new])
        self.paths.append(self._path)
        self._num_tokens += len(new)
        self.token_ids.append(sample.token_ids.numpy()[shared:])
        before = self._path[shared - 1 : -1] if shared else np.concatenate([[-1], new[:-1]])
        self.parents.append(before[: len(new)])
        self.trained.append(self._path[sample.trained.numpy()])
        self._add_slots(row)
        for segment in sample.segments:
            stop = self._num_trained + segment.stop - segment.start
            self.origins.append(
                TokenOrigin(
                    self._num_trained,
                    stop,
                    node=segment.node,
                    turn=segment.turn,
                    trace_id=sample.trace_id,
                    group_id=sample.group_id,
                    sample=len(self.paths) - 1,
                )
            )
            self._num_trained = stop

    def _add_slots(self, row: PackRow) -> None:
        sample, shared = row.sample, row.shared
        for item in sample.items:
            if self._places.setdefault(item.key, len(self.items)) == len(self.items):
                self.items.append(PackedItem(item, None, sample.trace_id))
        placed = [Slot(s.offset, s.length, sample.items[s.item]) for s in sample.slots]
        for slot, source in zip(placed, sample.slots, strict=True):
            place = self._places[slot.item.key]
            self._check_pixels(place, source.pixel_digest, sample.trace_id)
            if slot.offset >= shared:
                self.slots.append(Slot(int(self._path[slot.offset]), slot.length, place))
        along, _ = self._family.positions(len(sample.token_ids), placed)
        self.positions.append(along[:, shared:])

    def _check_pixels(self, place: int, pixel_digest: str | None, trace_id: str) -> None:
        """Keep the sampler's digest of an item's pixels. Raise if there are two."""
        known = self.items[place]
        if known.pixel_digest is None:
            self.items[place] = PackedItem(known.item, pixel_digest, known.wanted_by)
        elif pixel_digest is not None and pixel_digest != known.pixel_digest:
            raise PixelMismatch(
                f"{known.item.name}: the sampler saw pixels {known.pixel_digest} "
                f"for trace {known.wanted_by} and {pixel_digest} for {trace_id}",
                "run the same Pillow on every inference server",
            )

    def leave(self, shared: int) -> None:
        """Close the tokens that the next row does not share. Later tokens cannot attend to them."""
        self.subtree_end[self._path[shared:]] = self._num_tokens
        self._path = self._path[:shared]
