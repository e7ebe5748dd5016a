"""Units of samples laid out as a micro-batch, each token once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sightline.errors import PixelMismatch
from sightline.families import Family
from sightline.pack.tree import PackRow, PackUnit
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, PackedItem, TokenOrigin
from sightline.wire.sample import Sample


def build_micro_batch(
    units: Sequence[PackUnit], step: int, family: Family, weight_of: Mapping[int, float]
) -> MicroBatch:
    """One after another, each seeing only itself, through `subtree_end`."""
    laid = _MicroBatchBuilder(family)
    for unit in units:
        for row in unit:
            laid.add(row)
        laid.close()
    samples = [row.sample for unit in units for row in unit]
    return MicroBatch(
        step=step,
        token_ids=Array.of(_concatenate(laid.token_ids), "int32"),
        positions=Array.of(np.concatenate(laid.positions, axis=1), "int32"),
        subtree_end=Array.of(laid.subtree_end(), "int32"),
        parent=Array.of(_concatenate(laid.parents), "int32"),
        trained=Array.of(_concatenate(laid.trained), "int32"),
        logprobs=Array.of(_concatenate([s.logprobs.numpy() for s in samples]), "float32"),
        advantages=Array.of(_concatenate([s.advantages.numpy() for s in samples]), "float32"),
        loss_weight=Array.of(
            _concatenate([np.full(len(s.trained), weight_of[id(s)]) for s in samples]), "float32"
        ),
        versions=Array.of(_concatenate([s.versions.numpy() for s in samples]), "int32"),
        items=laid.items.packed(),
        slots=laid.slots,
        origins=laid.origins,
        temperature=samples[0].temperature,
    )


class _MicroBatchBuilder:
    """What has been laid out so far. `_path` has, for the row at hand, where its tokens lie."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._path = np.zeros(0, dtype=np.int64)
        self._ended: list[tuple[np.ndarray, int]] = []
        self._num_tokens = 0
        self._num_trained = 0
        self.token_ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.parents: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        self.items = _DistinctImages()
        self.slots: list[Slot[int]] = []
        self.origins: list[TokenOrigin] = []

    def add(self, row: PackRow) -> None:
        sample, shared = row.sample, row.shared
        self._leave(shared)
        new = np.arange(self._num_tokens, self._num_tokens + len(sample.token_ids) - shared)
        self._path = np.concatenate([self._path, new])
        self._num_tokens += len(new)
        self.token_ids.append(sample.token_ids.numpy()[shared:])
        before = self._path[shared - 1 : -1] if shared else np.concatenate([[-1], new[:-1]])
        self.parents.append(before[: len(new)])
        self.trained.append(self._path[sample.trained.numpy()])
        self._add_slots(row)
        for segment in sample.segments:
            stop = self._num_trained + segment.stop - segment.start
            self.origins.append(
                TokenOrigin(self._num_trained, stop, node=segment.node, trace_id=sample.trace_id)
            )
            self._num_trained = stop

    def _add_slots(self, row: PackRow) -> None:
        sample, shared = row.sample, row.shared
        where = [self.items.add(sample, i) for i in range(len(sample.items))]
        for slot in sample.slots:
            self.items.check(where[slot.item], slot.pixel_digest, sample)
            if slot.offset >= shared:
                at = int(self._path[slot.offset])
                self.slots.append(Slot(at, slot.length, where[slot.item]))
        placed = [Slot(s.offset, s.length, sample.items[s.item]) for s in sample.slots]
        along, _ = self._family.positions(len(sample.token_ids), placed)
        self.positions.append(along[:, shared:])

    def _leave(self, shared: int) -> None:
        """What the next row does not share is seen by nobody from here on."""
        self._ended.append((self._path[shared:], self._num_tokens))
        self._path = self._path[:shared]

    def close(self) -> None:
        self._leave(0)

    def subtree_end(self) -> np.ndarray:
        ends = np.zeros(self._num_tokens, dtype=np.int64)
        for tokens, end in self._ended:
            ends[tokens] = end
        return ends


class _DistinctImages:
    """The distinct images of a micro-batch, and what the sampler said of their pixels."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._packed: list[PackedItem] = []

    def add(self, sample: Sample, index: int) -> int:
        item = sample.items[index]
        place = self._places.setdefault(item.key, len(self._packed))
        if place == len(self._packed):
            self._packed.append(PackedItem(item, None, sample.trace_id))
        return place

    def check(self, place: int, pixel_digest: str | None, sample: Sample) -> None:
        held = self._packed[place]
        if held.pixel_digest is None:
            self._packed[place] = PackedItem(held.item, pixel_digest, held.wanted_by)
        elif pixel_digest is not None and pixel_digest != held.pixel_digest:
            raise PixelMismatch(
                f"image {held.item.ref.digest[:12]}: the sampler saw pixels {held.pixel_digest} "
                f"for trace {held.wanted_by} and {pixel_digest} for {sample.trace_id}",
                "run the same Pillow on every inference server",
            )

    def packed(self) -> list[PackedItem]:
        return self._packed


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)
