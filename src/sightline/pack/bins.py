"""Samples to micro-batches: trees where sharing pays, else rows side by side."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.families import Family
from sightline.pack.average import AVERAGE, Average
from sightline.pack.cost import Cost
from sightline.pack.lay import lay
from sightline.pack.tree import Row, Unit, as_units, cost_of
from sightline.wire.micro_batch import MicroBatch
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
    if family.packing.kind == "tree":
        units = as_units(samples, limit)
    else:
        units = [[Row(sample)] for sample in samples]
    if family.packing.kind == "rows":
        limit = Cost(0, 0)
    return [lay(units, step, family, weigh) for units in _bins(units, limit)]


def _bins(units: Sequence[Unit], limit: Cost) -> list[list[Unit]]:
    """First fit, longest first: few bins, and rows of like length beside one another.

    Trees and single rows do not share a bin: rows alone need no mask.
    """
    costs = [cost_of(unit) for unit in units]
    order = sorted(range(len(units)), key=lambda i: (-costs[i].tokens, i))
    kinds: dict[tuple[float, bool], list[tuple[Cost, list[Unit]]]] = {}
    for i in order:
        unit, cost = units[i], costs[i]
        bins = kinds.setdefault((unit[0].sample.temperature, len(unit) > 1), [])
        for place, (used, held) in enumerate(bins):
            if (used + cost).fits(limit):
                held.append(unit)
                bins[place] = (used + cost, held)
                break
        else:
            bins.append((cost, [unit]))
    return [held for bins in kinds.values() for _, held in bins]
