"""Flat packing: samples side by side, each seeing only itself, through `subtree_end`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sightline.errors import PixelMismatch
from sightline.families import Family, PlacedSlot
from sightline.pack.average import AVERAGE, Average
from sightline.pack.cost import Cost
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, Origin, PackedItem, PackedSlot
from sightline.wire.sample import Sample


def pack(
    samples: Sequence[Sample],
    step: int,
    family: Family,
    limit: Cost,
    average: Average = AVERAGE,
) -> list[MicroBatch]:
    """The micro-batches of a batch; `average` says what a trained token weighs in its loss.

    The same samples give the same packs, in every process and after every restart. A sample that
    is larger than `limit` gets a micro-batch of its own, and so does every sample of a family
    that cannot pack.
    """
    weigh = average.of(samples)
    if family.packing.kind == "rows":
        limit = Cost(0, 0)
    return [_micro_batch(group, step, family, weigh) for group in _bins(samples, limit)]


def _bins(samples: Sequence[Sample], limit: Cost) -> list[list[Sample]]:
    """First fit, longest first: few bins, and rows of like length beside one another."""
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].token_ids), i))
    by_temperature: dict[float, list[tuple[Cost, list[Sample]]]] = {}
    for i in order:
        sample = samples[i]
        cost = Cost.of(sample)
        bins = by_temperature.setdefault(sample.temperature, [])
        for place, (used, held) in enumerate(bins):
            if (used + cost).fits(limit):
                held.append(sample)
                bins[place] = (used + cost, held)
                break
        else:
            bins.append((cost, [sample]))
    return [held for bins in by_temperature.values() for _, held in bins]


def _micro_batch(
    samples: Sequence[Sample], step: int, family: Family, weigh: Callable[[Sample], float]
) -> MicroBatch:
    lengths = [len(sample.token_ids) for sample in samples]
    starts = np.cumsum([0, *lengths])
    ends = np.repeat(starts[1:], lengths)
    parent = np.arange(starts[-1]) - 1
    parent[starts[:-1]] = -1
    items = _Items()
    slots: list[PackedSlot] = []
    origins: list[Origin] = []
    positions: list[np.ndarray] = []
    num_trained = 0
    for sample, start in zip(samples, starts, strict=False):
        where = [items.add(sample, i) for i in range(len(sample.items))]
        for slot in sample.slots:
            items.check(where[slot.item], slot.pixel_digest, sample)
            slots.append(PackedSlot(slot.offset + int(start), slot.length, where[slot.item]))
        placed = [PlacedSlot(s.offset, s.length, sample.items[s.item].grid) for s in sample.slots]
        positions.append(family.positions(len(sample.token_ids), placed)[0])
        for segment in sample.segments:
            count = segment.stop - segment.start
            origins.append(Origin(sample.trace_id, segment.node, num_trained, num_trained + count))
            num_trained += count
    trained = _joined([s.trained.numpy() + at for s, at in zip(samples, starts, strict=False)])
    return MicroBatch(
        step=step,
        token_ids=Array.of(_joined([s.token_ids.numpy() for s in samples]), "int32"),
        positions=Array.of(np.concatenate(positions, axis=1), "int32"),
        subtree_end=Array.of(ends, "int32"),
        parent=Array.of(parent, "int32"),
        trained=Array.of(trained, "int32"),
        logprobs=Array.of(_joined([s.logprobs.numpy() for s in samples]), "float32"),
        advantages=Array.of(_joined([s.advantages.numpy() for s in samples]), "float32"),
        loss_weight=Array.of(
            _joined([np.full(len(s.trained), weigh(s)) for s in samples]), "float32"
        ),
        versions=Array.of(_joined([s.versions.numpy() for s in samples]), "int32"),
        items=items.packed(),
        slots=slots,
        origins=origins,
        temperature=samples[0].temperature,
    )


class _Items:
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


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)
