"""Packs a group's rollouts as a tree: a shared prefix is packed once.

Samples are put into depth-first order. Each adds only the tokens that it does not share with the
sample before it. A token is shared if everything up to it is the same: ids, items and their
places. A token that two rollouts sampled is computed once and trains with two advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sightline.pack.cost import PackSize
from sightline.wire.sample import Sample

MIN_SHARED_FRACTION = 0.25
"""The smallest saving that outweighs the cost of a tree's attention mask."""
_ITEM = 1 << 40
_IN_SLOT = 1 << 20


@dataclass(frozen=True, slots=True)
class PackRow:
    sample: Sample
    shared: int = 0
    """The length of the prefix that it shares with the previous row."""


PackUnit = list[PackRow]
"""Rows that stay together in a micro-batch: one sample, or a tree."""


def build_units(samples: Sequence[Sample], limit: PackSize) -> list[PackUnit]:
    """Build a tree for each group that saves enough, split at `limit`. Others stay single."""
    groups: dict[tuple[float, str], list[Sample]] = {}
    for sample in samples:
        group = sample.group_id or sample.trace_id  # a sample without a group stays alone
        groups.setdefault((sample.temperature, group), []).append(sample)
    units: list[PackUnit] = []
    for members in groups.values():
        rows = order_depth_first(members)
        total = sum(len(row.sample.token_ids) for row in rows)
        if sum(row.shared for row in rows) >= MIN_SHARED_FRACTION * total:
            units += split_tree(rows, limit)
        else:
            units += [[PackRow(sample)] for sample in members]
    return units


def order_depth_first(samples: Sequence[Sample]) -> list[PackRow]:
    """Return the samples as rows. Their order does not depend on the order of `samples`."""
    keys = _keys(samples)
    order = sorted(range(len(samples)), key=lambda i: (keys[i].tobytes(), samples[i].trace_id, i))
    rows, before = [], np.zeros(0, dtype=">i8")
    for i in order:
        rows.append(PackRow(samples[i], _count_common(before, keys[i])))
        before = keys[i]
    return rows


def _keys(samples: Sequence[Sample]) -> list[np.ndarray]:
    """Return the tokens, with the pads of a slot numbered by their item and place.

    Keys are big-endian, so that bytes sort like tokens.
    """
    items: dict[str, int] = {}
    keys = []
    for sample in samples:
        key = sample.token_ids.numpy().astype(">i8")
        for slot in sample.slots:
            number = items.setdefault(sample.items[slot.item].key, len(items) + 1)
            pads = number * _ITEM + slot.length * _IN_SLOT + np.arange(slot.length)
            key[slot.offset : slot.end] = pads
        keys.append(key)
    return keys


def _count_common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def split_tree(rows: Sequence[PackRow], limit: PackSize) -> list[PackUnit]:
    """Split rows into pieces that fit. The first row of each repeats its path as context."""
    pieces: list[PackUnit] = []
    for row in rows:
        if pieces and measure_unit([*pieces[-1], row]).fits(limit):
            pieces[-1].append(row)
        else:
            pieces.append([PackRow(row.sample)])
    return pieces


def measure_unit(unit: PackUnit) -> PackSize:
    tokens = sum(len(row.sample.token_ids) - row.shared for row in unit)
    patches = {item.key: item.num_patches for row in unit for item in row.sample.items}
    return PackSize(tokens, sum(patches.values()))
